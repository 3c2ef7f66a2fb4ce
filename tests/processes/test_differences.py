"""Processes that differ at the start are refused by all; what may differ comes from process 0."""

import pytest
import torch
from fakes.nets import whole
from processes.fragile import ONES, seen_of, step_of, values_of
from processes.world import run
from torch import nn
from torch.distributed import group
from torch.optim import SGD, Adam

from mgpu_core import TrainStep

pytestmark = pytest.mark.processes


def make_differently(process, what):
    net = whole(nn.Linear(3 if what == "net" and process == 1 else 2, 2))
    lr = 0.5 if what == "lr" and process == 1 else 1.0
    optimizer = SGD(net.parameters(), lr=lr)
    if what == "optimizer" and process == 1:
        optimizer = Adam(net.parameters())
    if what == "names" and process == 1:
        net.late = nn.Parameter(torch.ones(2), requires_grad=False)
    settings = {"accumulate": process + 1} if what == "settings" else {}
    return seen_of(lambda: step_of(net, optimizer=optimizer, **settings))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "net",
            "differ in parameter weight: ((2, 2), torch.float32) in process 0, ((2, 3), torch.float32) in process 1",
        ),
        ("names", "differ in parameter late: none in process 0, ((2,), torch.float32) in process 1"),
        ("lr", "differ in the optimizer's group 0: {'lr': 1.0"),
        ("optimizer", "differ in optimizer: SGD in process 0, Adam in process 1"),
        ("settings", "differ in accumulate: 1 in process 0, 2 in process 1"),
    ],
)
def test_processes_that_differ_are_refused_by_all(what, text):
    texts = run(make_differently, what)
    assert texts[0] == texts[1]
    assert texts[0].startswith("ValueError: ")
    assert text in texts[0]


def make_alike(process):
    torch.manual_seed(process)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        net[1].running_mean.fill_(process + 1.0)
        net[0].weight.data = net[0].weight.data.t()  # not contiguous
    step = step_of(net)
    first = values_of(net), net[1].running_mean.tolist()
    with torch.no_grad():
        net[0].bias.data.add_(process)
    step.check_replicas()  # of this process
    step.sync_parameters()
    return *first, values_of(net)


def test_values_are_those_of_process_0():
    found = run(make_alike)
    for values, mean, later in found:
        assert all(map(torch.equal, values, found[0][0]))
        assert all(map(torch.equal, later, found[0][0]))
        assert mean == [1.0, 1.0]


def rebuild(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    step(ONES, ONES)
    with torch.no_grad():
        net.bias.data.add_(process)
    step.rebuild()
    values = values_of(net)
    step(ONES, ONES)
    return values, values_of(net), step.steps


def test_rebuild_sends_the_values_of_process_0():
    (first, last, steps), (same, same_last, same_steps) = run(rebuild)
    assert all(map(torch.equal, first, same))
    assert all(map(torch.equal, last, same_last))
    assert steps == same_steps == 2


def load(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    step(ONES, ONES)
    state, values = step.state_dict(), values_of(net)
    step(ONES, ONES)
    step.load_state_dict(state)
    assert all(map(torch.equal, values_of(net), values))
    told = seen_of(lambda: step.load_state_dict({**state, "format": "other"})) if process == 1 else "nothing"
    step(ONES, ONES)
    return told, step.steps, values_of(net)


def test_each_process_loads_the_state_by_itself():
    (nothing, steps, values), (told, same_steps, same) = run(load)
    assert nothing == "nothing"
    assert told.startswith("ValueError: wanted a state with the mark")
    assert steps == same_steps == 2
    assert all(map(torch.equal, values, same))


def thaw(process, is_known):
    net = whole(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    net[0].requires_grad_(False)
    optimizer = SGD([each for each in net.parameters() if is_known or each.requires_grad], lr=1.0)
    step = step_of(net, optimizer=optimizer)
    step(ONES, ONES)
    before = values_of(net)
    net[0].requires_grad_(True)
    if not is_known:
        optimizer.add_param_group({"params": net[0].parameters()})
    told = seen_of(lambda: step(ONES, ONES))
    kept = all(map(torch.equal, values_of(net), before))
    if not is_known:
        step.rebuild()
        step(ONES, ONES)
    return told, kept, values_of(net), torch.equal(net[0].weight, before[0])


@pytest.mark.parametrize("is_known", [True, False])
def test_what_was_frozen_at_the_start(is_known):
    """Processes lay buffers out once, for the parameters that their optimizers have then, and for no later one."""
    one, other = run(thaw, is_known)
    assert [one[0], one[1], one[3]] == [other[0], other[1], other[3]]
    assert all(map(torch.equal, one[2], other[2]))
    told, kept, _, is_still = one
    assert kept == (not is_known)
    assert not is_still
    if not is_known:
        assert "parameter 0.weight was frozen, and none of the optimizer's" in told
        assert "step.rebuild() in all processes" in told


def odd_buffers(process):
    net = whole(nn.Linear(2, 2))
    net.register_buffer("wide", torch.full((1, 2), float(process + 1)).expand(3, 2))
    net.register_buffer("small", torch.tensor([process + 1], dtype=torch.int16))
    net.register_buffer("none", torch.ones(0, dtype=torch.int16))
    step = step_of(net)
    step(ONES, ONES)
    return net.wide.tolist(), net.small.tolist()


def test_buffers_of_every_kind_come_from_process_0():
    assert run(odd_buffers) == [([[1.0, 1.0]] * 3, [1])] * 2


def regularised(process):
    """A term that is not of the rows counts once, whoever has rows."""
    net = whole(nn.Linear(2, 2)).double()
    step = TrainStep(
        net, lambda output, target: (output - target).square().sum() / max(1, len(output)) + net.weight.square().sum(),
        SGD(net.parameters(), lr=0.01), ["cpu"], process_group=group.WORLD,
    )  # fmt: skip
    x = torch.ones(4, 2).double()
    for _ in range(2):
        step(*((x, x) if process == 0 else (x[:0], x[:0])))
    return values_of(net)


def test_a_process_without_rows_adds_nothing():
    found = run(regularised)
    net = whole(nn.Linear(2, 2)).double()
    optimizer = SGD(net.parameters(), lr=0.01)
    x = torch.ones(4, 2).double()
    for _ in range(2):
        optimizer.zero_grad()
        ((net(x) - x).square().sum() / 4 + net.weight.square().sum()).backward()
        optimizer.step()
    for values in found:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(values, values_of(net), strict=True))


class Keeps(SGD):
    """An optimizer with settings and state of its own kinds."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.param_groups[0]["names"] = {"a", "b"}
        self.param_groups[0]["decay"] = lambda step: step
        self.state["count"] = 1


def train_with_keeps(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net, optimizer=Keeps(net.parameters()))
    step(ONES, ONES)
    step.rebuild()
    return values_of(net)


def test_optimizers_that_keep_other_things():
    values, same = run(train_with_keeps)
    assert all(map(torch.equal, values, same))
