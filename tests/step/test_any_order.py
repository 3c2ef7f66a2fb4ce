"""A step among all that people do between two of its calls, in any order: it stays what one device would be.

Beside each step stands a model of it: the same net and the same class of optimizer, driven by torch alone.  What is
done to the one is done to the other; after everything both have the same parameters, the same state of the optimizer,
the same counts and running numbers, and, after an update, the same gradients.
"""

import contextlib
import copy

import pytest
import torch
from fakes.graphs import give_graphs, without_gpu
from fakes.machines import run_machine
from fakes.nets import cpu
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from step.nets import here, mse
from step.one_device import (
    LOSSES,
    OPTIMIZERS,
    REFUSED,
    TORCHS,
    Model,
    Net,
    RefusedError,
    add_late,
    batch_of,
    optimizer_of,
    same,
    state_of,
)
from torch import nn

import mgpu_core
from mgpu_core import TrainStep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:.*captured:UserWarning")]


def between_updates(machine):
    return not machine.model.open


class StepMachine(RuleBasedStateMachine):
    """What may be done to a step, one thing after the other."""

    def __init__(self):
        super().__init__()
        self.step = None

    @initialize(
        ranks=st.sampled_from([1, 2, 3, 8]),
        kind=st.sampled_from(sorted(OPTIMIZERS)),
        reduction=st.sampled_from(sorted(LOSSES)),
        accumulate=st.sampled_from([1, 1, 2, 3]),
        bucket_nbytes=st.sampled_from([1, 200, 10 * 2**20]),
        clip_norm=st.sampled_from([None, None, 0.1]),
        shards=st.booleans(),
        shares=st.booleans(),
        capture=st.booleans(),
        start=st.integers(0, 99),
    )
    def begin(self, ranks, kind, shards, shares, capture, start, **chosen):
        self.numbers = torch.Generator().manual_seed(start)
        torch.manual_seed(start)
        self.kind, self.capture, self.wants_shards, self.wants_shares = kind, capture, shards, shares
        self.settings = chosen | {"capture": capture, "error_if_nonfinite": not capture}
        alone = here(self.bare_net(not capture).double())
        self.net = self.wrapped(copy.deepcopy(alone))
        self.optimizer = optimizer_of(self.kind, self.net)
        self.model = Model(alone, optimizer_of(self.kind, alone, torch.optim), self.settings["reduction"], self.scale)
        self.saved, self.has_late = None, False
        self.make(ranks)

    # What other machines have of their own.

    amp_dtype, scale = None, None
    least_rows = 1
    bare_net = Net

    def wrapped(self, net):
        return net

    def make(self, ranks):
        devices = cpu(ranks)
        self.in_shards = self.wants_shards and len(set(devices)) > 1 and self.kind not in TORCHS
        more = {
            "amp_dtype": self.amp_dtype,
            "shard": "optimizer" if self.in_shards else None,
            "shares": [1 + rank % 3 for rank in range(ranks)] if self.wants_shares else None,
        }
        loss_fn = LOSSES[self.settings["reduction"]]
        self.step = TrainStep(self.net, loss_fn, self.optimizer, devices, **self.settings, **more)
        if self.capture:
            without_gpu(self.step)
        self.model.updates, self.model.scale = 0, self.scale

    def both(self):
        return (self.net, self.optimizer), (self.model.net, self.model.optimizer)

    def batch(self, rows, way):
        return batch_of(self.numbers, max(rows, self.least_rows), way)

    # What a step does.

    @rule(rows=st.integers(1, 11), way=st.integers(0, 3), outputs=st.booleans(), only_adds=st.booleans())
    def call(self, rows, way, outputs, only_adds):
        batch = self.batch(rows, way)
        if only_adds:
            with self.step.no_sync():
                found = self.step(*batch, return_outputs=outputs)
        else:
            found = self.step(*batch, return_outputs=outputs)
        expected, expected_outputs = self.model.call(batch)
        loss, mine = found if outputs else (found, expected_outputs)
        assert same(loss, expected)
        assert same(mine, expected_outputs)
        if not only_adds and len(self.model.open) >= self.step.accumulate:
            self.has_updated()

    @precondition(lambda self: self.capture)
    @rule(count=st.integers(3, 8), rows=st.sampled_from([3, 8]), way=st.integers(1, 2))
    def calls_alike(self, count, rows, way):
        """So many that some may be replays."""
        for _ in range(count):
            self.call(rows, way, False, False)

    def has_updated(self):
        self.model.update(self.step.clip_norm)
        if self.in_shards:
            assert all(each.grad is None for each in self.net.parameters())
            return
        for (name, mine), expected in zip(self.net.named_parameters(), self.model.gradients, strict=True):
            assert (mine.grad is None) == (expected is None), name
            # Ours clip and unscale in the kernel, and leave the sums as they are.
            assert expected is None or self.kind not in TORCHS or same(mine.grad, expected), name

    @rule()
    def flush(self):
        assert self.step.flush() == bool(self.model.open)
        if self.model.open:
            self.has_updated()

    @precondition(lambda self: self.net.refuses)
    @rule(rows=st.integers(1, 9), bad=st.integers(0, 8), way=st.integers(0, 2))
    def fail_in_a_rank(self, rows, bad, way):
        x, way, y = self.batch(rows, way)
        x[bad % len(x), 0] = REFUSED
        with pytest.raises(RefusedError, match="this row"):
            self.step(x, way, y)
        self.model.give_up()
        assert all(each.grad is None for each in self.net.parameters())

    @rule(rows=st.integers(1, 9))
    def fail_in_the_target(self, rows):
        x, way, y = self.batch(rows, 2)
        with pytest.raises((ValueError, RuntimeError)):
            self.step(x, way, y.new_zeros(len(x) + 20, 5))
        self.model.give_up()

    @rule(rows=st.integers(1, 9), way=st.integers(0, 3))
    def evaluate(self, rows, way):
        batch = self.batch(rows, way)
        loss, outputs = self.step.evaluate(*batch, return_outputs=True)
        with torch.no_grad():
            found, weight, expected = self.model.forward(*batch)
        assert same(loss, found / weight)
        assert same(outputs, expected)

    @rule(clip_norm=st.sampled_from([None, 0.05, 100.0]))
    def set_clip_norm(self, clip_norm):
        self.step.clip_norm = self.settings["clip_norm"] = clip_norm

    @precondition(between_updates)
    @rule(accumulate=st.sampled_from([1, 2]))
    def set_accumulate(self, accumulate):
        self.step.accumulate = self.settings["accumulate"] = accumulate

    # What people do to the optimizer.

    @rule(lr=st.sampled_from([0.005, 0.001, 0.0]), decay=st.sampled_from([0.0, 0.3]))
    def set_numbers(self, lr, decay):
        for _, optimizer in self.both():
            optimizer.param_groups[0].update(lr=lr, weight_decay=decay)

    @precondition(lambda self: self.kind in ("SGD", "momentum", "dampening", "torch's"))
    @rule(momentum=st.sampled_from([0.0, 0.8]))
    def set_momentum(self, momentum):
        for _, optimizer in self.both():
            optimizer.param_groups[0].update(momentum=momentum, nesterov=False)

    @precondition(lambda self: not self.has_late)
    @rule()
    def add_a_group(self):
        self.has_late = True
        for net, optimizer in self.both():
            add_late(net, optimizer)

    @precondition(between_updates)
    @rule(rows=st.integers(1, 9), way=st.integers(0, 2))
    def step_by_hand(self, rows, way):
        x, way, y = self.batch(rows, way)
        for net, optimizer in self.both():
            optimizer.zero_grad()
            mse(net(x, way), y).backward()
            optimizer.step()
            net.zero_grad()

    @rule()
    def zero_grad(self):
        for _, optimizer in self.both():
            optimizer.zero_grad()

    # What people do to the net.

    @rule(training=st.booleans())
    def switch_mode(self, training):
        for net, _ in self.both():
            net.train(training)

    @rule(layer=st.sampled_from(["first", "second"]), frozen=st.booleans())
    def freeze(self, layer, frozen):
        for net, _ in self.both():
            getattr(net, layer).requires_grad_(not frozen)

    @rule(factor=st.sampled_from([0.5, -1.0]))
    def write_in_place(self, factor):
        for net, _ in self.both():
            with torch.no_grad():
                net.first.weight.mul_(factor)
                net.last.bias.add_(factor)

    @rule()
    def write_through_data(self):
        for net, _ in self.both():
            net.second.weight.data.mul_(0.5)
        self.step.sync_parameters()

    @rule()
    def write_a_buffer(self):
        for net, _ in self.both():
            net.calls.fill_(100)

    @precondition(between_updates)
    @rule()
    def move_a_parameter(self):
        self.net.last.weight.data = self.net.last.weight.data.clone()

    @precondition(lambda self: not self.has_late)
    @rule()
    def move_what_the_optimizer_does_not_have(self):
        for net, _ in self.both():
            for each in net.late.parameters():
                each.data = each.data * 0.5

    @rule()
    def copy_the_net(self):
        twin = copy.deepcopy(self.net)
        with torch.no_grad():
            for each in twin.parameters():
                each.fill_(7)

    # What is kept and comes back.

    @rule()
    def save(self):
        self.saved = self.step.state_dict(), self.has_late, self.model.updates, self.model.scale
        self.saved_model = copy.deepcopy([self.model.net.state_dict(), self.model.optimizer.state_dict()])

    def load_the_model(self):
        for each, state in zip((self.model.net, self.model.optimizer), copy.deepcopy(self.saved_model), strict=True):
            each.load_state_dict(state)

    @precondition(lambda self: self.saved is not None and self.saved[1] == self.has_late)
    @rule()
    def load(self):
        self.step.load_state_dict(copy.deepcopy(self.saved[0]))
        self.load_the_model()
        self.model.updates, self.model.scale, self.model.open = *self.saved[2:], []

    @precondition(lambda self: self.saved is not None and self.saved[1] == self.has_late)
    @rule()
    def load_by_hand(self):
        state = copy.deepcopy(self.saved[0])
        self.net.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_the_model()

    @rule()
    def rebuild(self):
        self.step.rebuild()
        self.model.drop()
        if self.capture:
            without_gpu(self.step)

    @rule(ranks=st.sampled_from([1, 2, 3, 8]))
    def make_it_anew(self, ranks):
        """On other ranks, over the same net and optimizer."""
        self.step.close()
        self.model.drop()
        self.make(ranks)

    @precondition(between_updates)
    @rule(ranks=st.sampled_from([1, 2, 3]))
    def resume_elsewhere(self, ranks):
        """From its saved state, in another net and another step."""
        state, before, counts = self.step.state_dict(), self.net, (self.model.updates, self.model.scale)
        self.step.close()
        self.net = here(self.wrapped(self.bare_net(before.refuses)).double()).train(before.training)
        for mine, theirs in zip(self.net.parameters(), before.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        self.optimizer = optimizer_of(self.kind, self.net)
        if self.has_late:
            add_late(self.net, self.optimizer)
        self.make(ranks)
        self.step.load_state_dict(state)
        self.model.updates, self.model.scale = counts

    # What always holds.

    @invariant()
    def has_the_values_of_one_device(self):
        if self.step is None:
            return
        assert self.step.steps == self.model.updates
        for (name, mine), theirs in zip(self.net.named_parameters(), self.model.net.parameters(), strict=True):
            assert same(mine, theirs), name
        for (name, mine), theirs in zip(self.net.named_buffers(), self.model.net.buffers(), strict=True):
            assert same(mine, theirs), name
        assert self.scale is None or self.step.loss_scale.scale == self.model.scale
        self.step.check_replicas()

    @invariant()
    def has_the_state_of_one_device(self):
        if self.step is None:
            return
        mine, theirs = state_of(self.net, self.optimizer), state_of(self.model.net, self.model.optimizer)
        assert all(same(mine[index], value) for index, value in theirs.items())

    def teardown(self):
        if self.step is not None:
            self.step.close()
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in self.net.parameters())


class MeetingMachine(StepMachine):
    """The ranks meet in a layer, and share one backward."""

    least_rows = 2  # the variance of one number is none

    def bare_net(self, refuses):
        return Net(refuses, nn.BatchNorm1d(5))

    def wrapped(self, net):
        return mgpu_core.convert_sync_batchnorm(net)


class OverflowMachine(StepMachine):
    """With a loss scale; autocast leaves float64 as it is."""

    amp_dtype, scale = torch.float16, 2.0**16

    @rule(rows=st.integers(1, 9), bad=st.integers(0, 8), way=st.integers(0, 2), only_adds=st.booleans())
    def overflow(self, rows, bad, way, only_adds):
        batch = self.batch(rows, way)
        batch[2][bad % rows, 1] = float("inf")
        with self.step.no_sync() if only_adds else contextlib.nullcontext():
            self.step(*batch)
        self.model.call(batch)
        if not only_adds and len(self.model.open) >= self.step.accumulate:
            self.has_updated()


@pytest.mark.parametrize("start", [1, 2])
def test_a_step_is_one_device_whatever_comes_between(monkeypatch, start):
    give_graphs(monkeypatch, torch.get_default_device().type)
    run_machine(StepMachine, start)


def test_ranks_that_meet_are_one_device_whatever_comes_between(monkeypatch):
    give_graphs(monkeypatch, torch.get_default_device().type)
    run_machine(MeetingMachine, 1)


def test_an_overflow_is_one_device_s_whatever_comes_between(monkeypatch):
    give_graphs(monkeypatch, torch.get_default_device().type)
    run_machine(OverflowMachine, 1)
