"""``mgpu_core.advise``: what it gives, what it leaves alone, what it refuses."""

import copy
import dataclasses
import json
import random
import re
import sys

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core.tools.advise.from_trace import Traced
from mgpu_core.tools.advise.host_share import HostShare
from mgpu_core.tools.advise.measure import advised
from mgpu_core.tools.advise.picture import figure_of
from mgpu_core.tools.advise.plan import plan_of
from mgpu_core.tools.advise.result import Advice
from mgpu_core.tools.advise.shares import StepShares
from mgpu_core.tools.advise.strategies import DROP_IN, ENGINE, ONE

pytestmark = pytest.mark.slow

mse = nn.functional.mse_loss
DEFAULTS = {"batches": None, "optimizer": None, "loader": None}
FAST = {"device_ids": ["cpu"] * 2, "repeats": 1, "batches": [4]}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def sample(rows=8):
    return torch.ones(rows, 3), torch.ones(rows, 2)


def plan(**options):
    options = DEFAULTS | {"device_ids": ["cpu"] * 2, "repeats": 3, "seconds": 60} | options
    return plan_of(net(), mse, sample(), **options)


MS = {  # a step, by hand
    ONE: {4: 1e-3, 8: 2e-3, 32: 8e-3},
    DROP_IN: {4: 4e-3, 8: 4e-3, 32: 6e-3},
    ENGINE: {4: 2e-3, 8: 2e-3, 32: 4e-3},
}


def by_hand(way, rows, step, count):
    step()
    return MS[way][rows]


@pytest.fixture(scope="module")
def advice():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mgpu_core.tools.advise.measure.loader_seconds", lambda *_: 1e-3)
        return advised(plan(batches=[4, 32], loader=[sample()]), by_hand)


def test_the_numbers(advice):
    assert (advice.devices, advice.rows) == (("cpu", "cpu"), 8)
    assert (advice.ways, advice.batches) == ([ONE, DROP_IN, ENGINE], [4, 8, 32])
    assert all(len(each.seconds) == 3 for each in advice.measurements)
    assert advice.medians == {(way, rows): MS[way][rows] for way in MS for rows in MS[way]}
    assert advice.speedup(ENGINE, 32) == 2
    assert advice.speedup(ENGINE, 64) is None
    assert (advice.break_even.kind, round(advice.break_even.rows, 6)) == ("at", 8)  # as fast at 8, twice as fast at 32
    assert advice.recommendation.way == ONE
    assert advice.memory.parameters_nbytes == 4 * (16 + 8 + 8 + 10) + 8
    shares = advice.shares
    every = shares.compute_share + shares.exposed_share + shares.update_share + shares.overhead_share
    assert every == pytest.approx(1)
    assert advice.loader_s == 1e-3


def test_the_recommendation_knows_the_reason(monkeypatch):
    slow = StepShares(1.0, 0.3, 0.0, 0.6, 0.1, 0.0, 0.0)
    seen = Traced(slow, ())
    monkeypatch.setattr("mgpu_core.tools.advise.measure.record_steps", lambda *_: seen)
    found = advised(plan(), by_hand)
    assert found.reason.name == "update"
    assert "TrainStep(accumulate=4)" in found.recommendation.text


def test_the_text(advice):
    lines = str(advice).splitlines()
    assert lines[0].startswith("one device against 2 ranks (cpu, cpu): time of a training step, median of 3")
    table = [line.split() for line in lines[3:7]]
    assert table[0] == ["batch", "one", "device", "DataParallel", "TrainStep"]
    assert table[2] == ["8", "*", "2", "ms", "4", "ms", "x", "0.50", "2", "ms", "x", "1.00"]
    begins = [line.partition(":")[0] for line in lines[8:] if line]
    wanted = ["break-even", "memory per rank", "a recorded step of TrainStep", "imbalance", "input pipeline", "reason"]
    assert [each for each in begins if each in wanted] == wanted
    # The step that was recorded is a real one: what else is advised depends on how fast the machine was.
    assert "recommendation: one device: 2 ms a step. Keep the plain loop." in lines


def test_the_hosts_share_is_told(advice):
    found = dataclasses.replace(advice, host=HostShare(32, 4.1e-3, 3.6e-3, 15.5e-3))
    assert (
        "host: 4.1 ms a rank for forward and loss, 3.6 ms for backward; GPU: 15.5 ms for 32 rows: "
        "one process keeps 2 GPUs busy"
    ) in str(found).splitlines()
    assert Advice.from_json(found.to_json()) == found
    older = json.loads(advice.to_json())
    del older["host"]
    assert Advice.from_json(json.dumps(older)) == advice


def test_json_goes_there_and_back(advice):
    text = advice.to_json()
    assert Advice.from_json(text) == advice
    told = json.loads(text)["measurements"]
    assert [each["speedup"] for each in told if each["way"] == ENGINE] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not advice: wanted"),
        ('{"format": "mgpu_core advice 1"}', r"a field is missing or wrong \('memory'\)"),
    ],
)
def test_damaged_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Advice.from_json(text)


def test_the_picture_has_the_notes_of_the_table(advice):
    pytest.importorskip("matplotlib")
    busy = dataclasses.replace(advice, notes=("the machine was busy",))
    axis = figure_of(busy).axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("batch, rows", "times as fast as one device")
    assert figure_of(busy).get_supxlabel() == "note: the machine was busy"
    assert "note: the machine was busy" in str(busy).splitlines()
    assert figure_of(dataclasses.replace(advice, notes=())).get_supxlabel() == ""


def test_the_picture_is_a_png(advice, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    advice.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"a picture needs matplotlib: pip install 'mgpu-core\[mnist\]'"):
        advice.plot(tmp_path / "b.png")


def test_net_and_random_numbers_are_as_before():
    mine = net()
    mine[1].eval()  # a mode of its own
    mine[0].weight.grad = torch.full_like(mine[0].weight, 7.0)
    calls = []
    mine.register_forward_hook(lambda *_: calls.append(1))
    loss = nn.CrossEntropyLoss()
    before, modes = copy.deepcopy(mine.state_dict()), [each.training for each in mine.modules()]
    identities = [id(each) for each in mine.parameters()]
    x, y = torch.randn(8, 3, requires_grad=True), torch.ones(8, dtype=torch.int64)
    torch.manual_seed(5)
    random.seed(5)
    state, pythons = torch.get_rng_state(), random.getstate()
    found = mgpu_core.advise(mine, loss, (x, y), optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **FAST)
    assert not [each.error for each in found.measurements if each.error]
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == pythons
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    assert [each.training for each in mine.modules()] == modes
    assert [id(each) for each in mine.parameters()] == identities
    assert mine[0].weight.grad.eq(7.0).all()
    assert mine[1].weight.grad is None
    assert x.grad is None
    assert [len(each._forward_hooks) for each in mine.modules()] == [1, 0, 0, 0, 0]
    assert not any(each._backward_hooks for each in mine.parameters())


def test_gradients_are_on_inside():
    with torch.no_grad():
        found = mgpu_core.advise(net(), mse, sample(), **FAST)
    assert not [each.error for each in found.measurements if each.error]


def test_a_net_that_gives_its_loss():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    found = mgpu_core.advise(Own(3, 2), None, (torch.ones(8, 3),), **FAST)
    assert not [each.error for each in found.measurements if each.error]
    assert found.notes == () or "busy" in found.notes[0]


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("this module holds a socket")


def test_a_net_that_cannot_be_copied_fails_in_every_way():
    found = mgpu_core.advise(NoCopy(3, 2), mse, sample(), **FAST)
    assert {each.error for each in found.measurements} == {"TypeError: this module holds a socket"}
    assert (found.recommendation.way, found.reason.name) == ("", "unknown")
    assert (found.memory, found.shares, found.break_even.kind) == (None, None, "unknown")
    assert "failed: TrainStep with 8 rows: TypeError: this module holds a socket" in str(found)
    assert "note: memory was not counted: TypeError" in str(found)
    assert Advice.from_json(found.to_json()) == found


class OneThread(nn.Linear):
    """Works on whole batches alone."""

    def forward(self, x):
        if len(x) < 4:
            raise RuntimeError("too few rows")
        return super().forward(x)


def test_a_way_that_fails_leaves_the_others():
    found = mgpu_core.advise(OneThread(3, 2), mse, sample(6), **FAST | {"batches": [6]})
    assert [bool(each.error) for each in found.measurements] == [False, True, True]
    assert "too few rows" in found.measurements[2].error
    assert found.recommendation.way == ONE


def test_the_time_is_told(monkeypatch):
    found = mgpu_core.advise(net(), mse, sample(), device_ids=["cpu"] * 2, seconds=1e-6)
    assert found.batches == [8]  # the sample's own comes first
    assert {len(each.seconds) for each in found.measurements} == {3}
    assert "3 repeats instead of 7 with 8 rows: the time was up" in found.notes
    assert "the 1e-06 s were over: batches of 2, 32 rows were not measured" in found.notes


def test_a_loader_that_fails_is_a_note():
    def broken():
        yield sample()
        raise OSError("the disk is gone")

    found = mgpu_core.advise(net(), mse, sample(), loader=broken(), **FAST)
    assert "the loader was not measured: OSError: the disk is gone" in found.notes
    assert found.loader_s is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"net": print}, TypeError, "net must be a torch.nn.Module"),
        ({"net": nn.DataParallel(nn.Linear(1, 1))}, TypeError, "pass what it wraps"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function or None, not 3"),
        (
            {"sample": torch.ones(4, 3)},
            TypeError,
            r"a tuple of tensors, .* not a tensor of shape",
        ),
        ({"sample": ()}, TypeError, "not an empty one"),
        ({"sample": (torch.ones(4), "y")}, TypeError, r"sample\[1\] must be a tensor with rows .* not a str"),
        ({"sample": (torch.tensor(1.0), torch.ones(1))}, TypeError, r"sample\[0\] must be a tensor with rows"),
        ({"sample": (torch.ones(4),)}, ValueError, "sample has no target"),
        ({"sample": (torch.ones(4), torch.ones(3))}, ValueError, r"sample\[0\] has shape \(4,\), sample\[1\] \(3,\)"),
        ({"sample": sample(1)}, ValueError, "the sample has 1 rows for 2 ranks"),
        ({"batches": [1]}, ValueError, "at least one for each of 2 ranks: 1"),
        ({"batches": [2.5]}, ValueError, "a batch must be a whole number of rows"),
        ({"repeats": 0}, ValueError, "repeats must be a whole number, 1 or more, not 0"),
        ({"repeats": True}, ValueError, "repeats must be"),
        ({"seconds": 0}, ValueError, "seconds must be a positive number, not 0"),
        ({"seconds": float("nan")}, ValueError, "seconds must be a positive number"),
        ({"device_ids": ["warp"]}, ValueError, "'warp' is not a device"),
        ({"device_ids": ["cuda:99"]}, ValueError, "device cuda:99 does not exist"),
        ({"device_ids": []}, ValueError, "device_ids is empty"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, TypeError, "a function from parameters .* not a SGD"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(arguments, error, message, monkeypatch):
    monkeypatch.setattr("mgpu_core.tools.advise.measure.advised", lambda *_: pytest.fail("measured"))
    given = {"net": net(), "loss_fn": mse, "sample": sample(), "device_ids": ["cpu"] * 2} | arguments
    with pytest.raises(error, match=message):
        mgpu_core.advise(given.pop("net"), given.pop("loss_fn"), given.pop("sample"), **given)


def test_a_recording_would_be_measured_too():
    with mgpu_core.explain(), pytest.raises(RuntimeError, match=re.escape("call advise() outside of it")):
        mgpu_core.advise(net(), mse, sample())
