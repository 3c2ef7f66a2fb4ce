"""A predictor on devices with streams: on which device its module runs, and who waits for whom."""

import threading

import pytest
import torch
from fakes.accelerator import device_module
from fakes.as_gpus import gpus, id_of, waits  # noqa: F401
from torch import nn

from mgpu_core import Pipeline, Predictor, place
from mgpu_core.devices import streams

pytestmark = pytest.mark.usefixtures("gpus")
DEVICES = ["fake:0", "fake:1"]
ONE = torch.device("fake", 1)


@pytest.fixture(autouse=True)
def pinned(monkeypatch):
    """The fakes' memory is the host's: there is nothing to pin."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr("mgpu_core.inference.requests.GPU_TYPE", "fake")


def test_the_module_of_each_rank_runs_with_its_device_current():
    """A tensor that is made on "the" accelerator, and a kernel that starts on the current one, are the rank's."""
    seen, both = set(), threading.Barrier(2)

    class Net(nn.Linear):
        def forward(self, x):
            where = x.device.index, torch.accelerator.current_device_index()
            if where not in seen:
                seen.add(where)
                both.wait(20)  # else one worker may take all requests
            return super().forward(x)

    with Predictor(Net(3, 3).to("fake:0"), DEVICES, max_batch=1, max_wait_ms=0) as predict:
        for future in [predict.submit(torch.ones(1, 3)) for _ in range(60)]:
            future.result(20)
    assert seen == {(0, 0), (1, 1)}


@pytest.mark.parametrize("rows", [3, 12])
def test_a_request_on_a_stream_of_the_users(rows):
    """The worker waits for what has made it, and the allocator for who reads the answer."""
    own, worker = torch.Stream(ONE), torch.accelerator.current_stream(ONE)
    with Predictor(nn.Identity(), ["fake:1"], max_batch=4) as predict:
        waits(), device_module.built.take_recorded()
        with streams.on(ONE, own):
            x = torch.arange(3.0 * rows, device=ONE).view(rows, 3)
            answer = predict(x)
        assert (id_of(worker), id_of(own)) in waits()
        assert own.stream_id in {stream for _, stream in device_module.built.take_recorded()}
    assert torch.equal(answer, x)


def test_answers_on_the_host_do_not_keep_the_memory_of_their_batch():
    with Predictor(nn.Identity(), ["fake:1"], max_batch=4, max_wait_ms=1000) as predict:
        futures = [predict.submit(torch.full((1, 3), float(number), device="cpu")) for number in range(4)]
        answers = [future.result(20) for future in futures]
        assert [each.batches for each in predict.stats()] == [1]
    assert [each.tolist() for each in answers] == [[[float(number)] * 3] for number in range(4)]
    assert {each.untyped_storage().nbytes() for each in answers} == {12}


class Layers(nn.Sequential):
    def answer(self, x):
        """The same as forward; its output stays on the last device."""
        for each in self:
            x = each(x)
        return x


def net():
    torch.manual_seed(0)
    return Layers(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def placed(devices):
    return place(net(), devices, ["2"])


CUTS = {
    "place": (placed, "forward"),
    "method": (placed, "answer"),
    "pipeline": (lambda devices: Pipeline(net(), devices, split_points=["2"]), "forward"),
}


@pytest.mark.parametrize("devices", [["cpu", "fake:0"], ["fake:0", "cpu"], DEVICES], ids=str)
@pytest.mark.parametrize(("cut", "method"), CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("output_device", [None, "fake:2"])
def test_answers_of_a_net_on_several_devices_are_there(cut, method, devices, output_device):
    """Its last device copies them to the host; so it does those that are compared with requests alone."""
    x = torch.arange(12.0, device="cpu").view(4, 3)
    wanted = net().cpu()(x).detach()
    options = {"max_batch": 4, "max_wait_ms": 1000, "output_device": output_device, "method": method}
    with Predictor(cut(devices), **options) as predict:
        for _ in range(2):
            answers = [each.result(20) for each in [predict.submit(row[None]) for row in x]]
            torch.testing.assert_close(torch.cat(answers).cpu(), wanted)
        assert [each.batches for each in predict.stats()] == [2 if method == "forward" else 8]


def test_a_second_device_that_is_lost(monkeypatch):
    """Requests get the error, and the predictor is closed, as where the first device is lost."""
    ones = torch.ones

    def lost(*args, device=None, **kwargs):
        if device == ONE:
            raise RuntimeError("fake:1 is lost")
        return ones(*args, device=device, **kwargs)

    with Predictor(placed(DEVICES), max_wait_ms=0) as predict:
        monkeypatch.setattr(torch, "ones", lost)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            predict(ones(1, 5, device="cpu"))
        assert [each.is_lost for each in predict.stats()] == [True]
