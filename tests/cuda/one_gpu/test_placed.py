"""A net on the CPU and the GPU: when answers are there, what threads share, and which device is current."""

import copy
import time

import pytest
import torch
from fakes.here import in_threads
from torch import nn

import mgpu_core


class Late(nn.Linear):
    """A layer whose output is there late, on a GPU."""

    def __init__(self, here, *sizes):
        super().__init__(*sizes)
        self.here = here

    def forward(self, x):
        if x.device.type == "cuda":
            self.here.sleep(2)
        return super().forward(x)


class Layers(nn.Sequential):
    def answer(self, x):
        """The same as forward; its output stays on the last device."""
        for each in self:
            x = each(x)
        return x


CUTS = {
    "place": ("forward", lambda net, devices: mgpu_core.place(net, devices, ["2"])),
    "method": ("answer", lambda net, devices: mgpu_core.place(net, devices, ["2"])),
    "pipeline": ("forward", lambda net, devices: mgpu_core.Pipeline(net, devices, split_points=["2"], chunks=2)),
}


@pytest.mark.parametrize("is_cpu_first", [True, False])
@pytest.mark.parametrize(("method", "cut"), CUTS.values(), ids=CUTS)
def test_answers_to_requests_behind_a_late_stream(here, method, cut, is_cpu_first):
    """Requests from the CPU and the GPU; whoever answers before the last device has copied its output, answers NaN."""
    torch.manual_seed(0)
    net = Layers(Late(here, 16, 256), nn.Tanh(), Late(here, 256, 64)).eval()
    alone = copy.deepcopy(net).cpu()
    devices = ["cpu", here.name] if is_cpu_first else [here.name, "cpu"]
    with mgpu_core.Predictor(cut(net, devices), max_batch=8, max_wait_ms=1, method=method) as predict:
        for turn in range(6):
            xs = [torch.randn(1 + index % 3, 16, device="cpu") for index in range(8)]
            given = list(xs)
            with here.stream():
                here.sleep(3)
                given[::2] = [x.to(here.device, non_blocking=True) for x in xs[::2]]
                futures = [predict.submit(x) for x in given]
            for x, asked, future in zip(xs, given, futures, strict=True):
                answer = future.result(30)
                assert answer.device == asked.device
                torch.testing.assert_close(answer.cpu(), alone(x).detach(), rtol=1e-3, atol=1e-4, msg=f"turn {turn}")
            here.poison()
        assert sum(each.failures for each in predict.stats()) == 0


class Tied(nn.Module):
    """Its head has the weight of the first layer, and takes a while to be launched."""

    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), Slow(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.words(tokens))))


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.002)
        return super().forward(x)


def tied(here):
    torch.manual_seed(0)
    net = Tied().eval()
    return copy.deepcopy(net).cpu(), mgpu_core.place(net, ["cpu", here.name], ["head"])


def tokens_of(index):
    return torch.arange(index, index + 12, device="cpu").reshape(1, 12) % 64


def test_two_batches_in_flight_with_a_tied_weight(here):
    alone, placed = tied(here)
    with mgpu_core.Predictor(placed, max_batch=1, max_wait_ms=0, in_flight=2) as predict:
        futures = [predict.submit(tokens_of(index)) for index in range(60)]
        for index, future in enumerate(futures):
            torch.testing.assert_close(future.result(30), alone(tokens_of(index)).detach(), rtol=1e-3, atol=1e-4)
        assert sum(each.failures for each in predict.stats()) == 0


@pytest.mark.parametrize("with_grad", [True, False])
def test_two_threads_with_a_tied_weight(here, with_grad):
    """Each on a stream of its own."""
    alone, placed = tied(here)
    placed(tokens_of(0))

    def call(index):
        with here.stream(), torch.set_grad_enabled(with_grad):
            for turn in range(40):
                tokens = tokens_of(40 * index + turn)
                made = placed(tokens).detach()
                torch.testing.assert_close(made, alone(tokens).detach(), rtol=1e-3, atol=1e-4)

    in_threads(call, 2)
    assert placed.head.weight is placed.words.weight


class Where(nn.Linear):
    seen: list[tuple[int | None, int]]

    def forward(self, x):
        if x.device.type != "cpu":
            self.seen.append((x.device.index, torch.accelerator.current_device_index()))
        return super().forward(x)


def test_the_device_of_a_placed_layer_is_current_in_it(here):
    """Of several GPUs the last one has a layer: it is not the one that is current around the call."""
    last = (
        here.device.type if here.device.type == "cpu" else f"{here.device.type}:{torch.accelerator.device_count() - 1}"
    )
    layers = [Where(4, 4) for _ in range(3)]
    seen: list[tuple[int | None, int]] = []
    for each in layers:
        each.seen = seen
    placed = mgpu_core.place(nn.Sequential(*layers), ["cpu", here.name, last], ["1", "2"])
    placed(torch.ones(2, 4, device="cpu"))
    seen.clear()
    placed(torch.ones(2, 4, device="cpu"))
    wanted = [torch.device(name).index for name in (here.name, last) if name != "cpu"]
    assert seen == [(index, index) for index in wanted]
