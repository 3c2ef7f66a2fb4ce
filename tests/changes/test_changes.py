"""What is changed between two calls is followed: losses, parameters, gradients and state stay those of one device."""

from contextlib import nullcontext

import pytest
import torch
from changes.table import CHANGES, IN_SHARDS, OURS, WAYS, Loss, net
from fakes.nets import cpu
from step.nets import batches, same_state

from mgpu_core import DataParallel, Pipeline, TrainStep

STAGES = 3
# Rows of torch's optimizers, which shards refuse, and of gradients that a step in shards does not show.
NOT_IN_SHARDS = {
    "exchanged groups", "scheduled, tensor", "parameters put elsewhere by their optimizer", "own entry beside, rmsprop",
    "parameter gone", "layer behind the optimizer's back",
}  # fmt: skip


def rows():
    for name, change in CHANGES.items():
        refused = name in NOT_IN_SHARDS or name.startswith(("by hand", "step replaced"))
        yield from ((name, way) for way in change.ways if way != IN_SHARDS or not refused)


class Side:
    """A net, its optimizer and its loss, and a call that trains with them."""

    def __init__(self, net, make):
        self.net, self.optimizer, self.loss_fn = net, make(net.parameters()), Loss()
        self.run, self.rebuild, self.whole = net, lambda: None, nullcontext

    def call(self, x, y):
        self.net.zero_grad()
        loss = self.loss_fn(self.run(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def evaluate(self, x, y):
        with torch.no_grad():
            return self.loss_fn(self.run(x), y)


class Ours(Side):
    def __init__(self, way, net, make, ranks, **settings):
        super().__init__(net, OURS.get(make, make) if way == IN_SHARDS else make)
        devices = cpu(ranks)
        if way == IN_SHARDS:
            settings = {"bucket_nbytes": 1, "shard": "parameters"}
        if way == "drop-in":
            self.run = DataParallel(net, devices)
        if "pipeline" in way:
            self.run = Pipeline(net, cpu(STAGES), split_points=["1", "2"], chunks=ranks)
            devices = None
        if "step" in way:
            self.call = TrainStep(self.run, self.loss_fn, self.optimizer, devices, **settings)
            self.evaluate, self.rebuild = self.call.evaluate, self.call.rebuild
            self.whole = self.call.full_parameters


def close(one, other):
    return torch.allclose(one.cpu(), other.cpu(), rtol=0, atol=1e-12)


def ours_beside_torchs(one, other):
    """Compare the states of the parameters that the optimizers have still; counts are of other dtypes."""
    kept = []
    for optimizer in (one, other):
        parameters = {each for group in optimizer.param_groups for each in group["params"]}
        for gone in [each for each in optimizer.state if each not in parameters]:
            del optimizer.state[gone]  # its parameter has left the optimizer
        states = optimizer.state_dict()["state"]
        kept.append([states.get(index, {}) for index in range(len(parameters))])
    pairs = [
        (mine[key], value) for mine, state in zip(*kept, strict=True) for key, value in state.items() if key != "name"
    ]
    return all(close(*(torch.as_tensor(value).double() for value in pair)) for pair in pairs)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize(("at", "settings"), [(0, {}), (2, {"bucket_nbytes": 1})], ids=["first", "later"])
@pytest.mark.parametrize(("name", "way"), [*rows()])
def test_a_change_is_followed(name, way, at, settings, ranks):
    """Before the first call, and between two; in buckets that are summed at the end, and during the backward."""
    change = CHANGES[name]
    ours, alone = Ours(way, net(), change.make, ranks, **settings), Side(net(), change.make)
    for i, batch in enumerate(batches(at + 3, [9, 4, 9, 1, 9])):
        for side in (ours, alone):
            with side.whole():
                if i == at:
                    change.do(side)
                if i == at + 2:
                    change.back(side)
        assert close(ours.evaluate(*batch), alone.evaluate(*batch))
        assert close(ours.call(*batch), alone.call(*batch))
        with ours.whole():
            for (name, one), other in zip(ours.net.named_parameters(), alone.net.parameters(), strict=True):
                assert close(one, other), name
                assert way == IN_SHARDS or (one.grad is None) == (other.grad is None), name
                assert one.grad is None or close(one.grad, other.grad), name
    if way == IN_SHARDS:
        assert ours_beside_torchs(ours.optimizer, alone.optimizer)
    else:
        assert same_state(ours, alone)
    assert "step" not in way or ours.call.steps == at + 3
    with ours.whole():
        change.check(ours)


REGISTERS = {
    "parameter": lambda net, hook: net[1][0].weight.register_hook(hook),
    "forward_pre_hook": lambda net, hook: net[1][0].register_forward_pre_hook(hook),
    "forward_hook": lambda net, hook: net[1][0].register_forward_hook(hook),
    "forward_hook with keywords": lambda net, hook: net[1][0].register_forward_hook(hook, with_kwargs=True),
    "full_backward_hook": lambda net, hook: net[1][0].register_full_backward_hook(hook),
}


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REGISTERS)
def test_hooks_come_and_go(kind, way, begin, ranks):
    """Of modules once per rank or micro-batch; of parameters once per call, on the sum."""
    ours, calls, counts = Ours(way, net(), CHANGES["hook of a parameter"].make, ranks), [], []
    for i, batch in enumerate(batches(begin + 3, 16)):
        if i == begin:
            handle = REGISTERS[kind](ours.net, lambda *_: calls.append(None))
        if i == begin + 2:
            handle.remove()
        calls.clear()
        ours.call(*batch)
        counts.append(len(calls))
    each = 1 if kind == "parameter" else ranks
    assert counts == [0] * begin + [each, each, 0]


@pytest.mark.parametrize("in_context", [False, True])
def test_a_step_by_hand_and_one_that_stands_in_are_told(in_context, ranks):
    ours = Ours(IN_SHARDS, net(), CHANGES["by hand, ours"].make, ranks)
    x, y = next(iter(batches(1, 8)))
    ours.call(x, y)
    with ours.whole() if in_context else nullcontext(), pytest.raises(RuntimeError, match=r"by hand.*step.close\(\)"):
        ours.optimizer.step()
    CHANGES["step replaced, momentum"].do(ours)
    with pytest.warns(UserWarning, match="see no gradients with shard"):
        ours.call(x, y)
