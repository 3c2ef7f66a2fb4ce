"""Steps of several processes, among all that people do between two of their calls: they stay one device.

Each process draws the same doings from the same numbers, and has beside its step a model of all of them: one device
with all rows of all processes.
"""

import contextlib
import copy
import random

import pytest
import torch
from processes.world import run
from torch.distributed import group
from train.nets import mse
from train.one_device import (
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

from mgpu_core import Error, TrainStep

PROCESSES, DOINGS = 2, 60


class Process:
    """One of them."""

    def __init__(self, process, start):
        self.process, self.draw = process, random.Random(start)
        torch.manual_seed(start)
        self.numbers = torch.Generator().manual_seed(start)
        self.kind = self.draw.choice(sorted(OPTIMIZERS))
        self.settings = {
            "reduction": self.draw.choice(sorted(LOSSES)),
            "accumulate": self.draw.choice([1, 1, 2, 3]),
            "bucket_nbytes": self.draw.choice([1, 200, 10 * 2**20]),
            "clip_norm": self.draw.choice([None, None, 0.1]),
        }
        self.net = Net(True).double()
        alone = copy.deepcopy(self.net)
        self.optimizer = optimizer_of(self.kind, self.net)
        self.model = Model(alone, optimizer_of(self.kind, alone, torch.optim), self.settings["reduction"])
        self.calls = self.calls_before = 0.0  # of this process alone
        self.saved, self.has_late = None, False
        self.make()

    def make(self):
        """On some ranks, in each process on as many as it likes."""
        ranks = [self.draw.choice([1, 2, 3]) for _ in range(PROCESSES)][self.process]
        loss_fn = LOSSES[self.settings["reduction"]]
        self.step = TrainStep(
            self.net, loss_fn, self.optimizer, ["cpu"] * ranks, process_group=group.WORLD, **self.settings
        )
        self.take_buffers_of_the_first()
        self.model.updates = 0

    def take_buffers_of_the_first(self):
        self.calls = float(self.net.calls)

    def both(self):
        return (self.net, self.optimizer), (self.model.net, self.model.optimizer)

    def batch(self, way):
        return batch_of(self.numbers, self.draw.randint(1, 7), way)

    def batches(self):
        """One per process."""
        return [self.batch(self.draw.randint(0, 3)) for _ in range(PROCESSES)]

    def count_a_call(self):
        if not self.model.open:
            self.calls_before = self.calls
        self.calls += self.net.training

    def give_up(self):
        if self.model.open:
            self.calls = self.calls_before
        self.model.drop()

    def may_update(self):
        return len(self.model.open) // PROCESSES + 1 >= self.step.accumulate

    # What is done.

    def call(self):
        batches, only_adds = self.batches(), self.draw.random() < 0.3
        will_update = self.may_update() and not only_adds
        with self.step.no_sync() if only_adds else contextlib.nullcontext():
            loss = self.step(*batches[self.process])
        self.count_a_call()
        losses = [self.model.call(each)[0] for each in batches]
        assert same(loss, losses[self.process])
        if will_update:
            self.has_updated()

    def has_updated(self):
        self.model.update(self.step.clip_norm)
        for (name, mine), expected in zip(self.net.named_parameters(), self.model.gradients, strict=True):
            assert (mine.grad is None) == (expected is None), name
            assert expected is None or self.kind not in TORCHS or same(mine.grad, expected), name

    def flush(self):
        assert self.step.flush() == bool(self.model.open)
        if self.model.open:
            self.has_updated()

    def fail(self):
        batches, failing = self.batches(), self.draw.randrange(PROCESSES)
        if not self.may_update():
            return
        batches[failing][0][-1, 0] = REFUSED
        expected = pytest.raises(Error, match=f"process {failing} gave this step up")
        with pytest.raises(RefusedError) if failing == self.process else expected:
            self.step(*batches[self.process])
        self.give_up()
        assert all(each.grad is None for each in self.net.parameters())

    def evaluate(self):
        batches, one = self.batches(), self.draw.randrange(PROCESSES)
        if one == self.process:
            loss = self.step.evaluate(*batches[one])
            self.calls += self.net.training
            with torch.no_grad():
                found, weight, _ = self.model.forward(*batches[one])
            assert same(loss, found / weight)

    def set_numbers(self):
        lr, decay, clip_norm = (self.draw.choice(each) for each in ([0.005, 0.001, 0.0], [0.0, 0.3], [None, 0.05]))
        for _, optimizer in self.both():
            optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
        self.step.clip_norm = self.settings["clip_norm"] = clip_norm

    def set_accumulate(self):
        accumulate = self.draw.choice([1, 2])
        if not self.model.open:
            self.step.accumulate = self.settings["accumulate"] = accumulate

    def add_a_group(self):
        if not self.has_late:
            for net, optimizer in self.both():
                add_late(net, optimizer)
        self.has_late = True

    def step_by_hand(self):
        x, way, y = self.batch(2)
        if self.model.open:
            return
        for net, optimizer in self.both():
            optimizer.zero_grad()
            mse(net(x, way), y).backward()
            optimizer.step()
            net.zero_grad()
        self.calls += self.net.training

    def switch_mode(self):
        training = self.draw.random() < 0.5
        for net, _ in self.both():
            net.train(training)

    def freeze(self):
        layer, frozen = self.draw.choice(["first", "second"]), self.draw.random() < 0.5
        for net, _ in self.both():
            getattr(net, layer).requires_grad_(not frozen)

    def write_in_place(self):
        for net, _ in self.both():
            with torch.no_grad():
                net.first.weight.mul_(0.5)

    def write_in_one_process(self):
        """And give all of them what the first one has."""
        with torch.no_grad():
            self.model.net.second.weight.mul_(0.5)
            self.net.second.weight.data.mul_(0.5 if self.process == 0 else 3.0)
        self.step.sync_parameters()
        self.take_buffers_of_the_first()

    def check(self):
        self.step.check_replicas()

    def save(self):
        self.saved = self.step.state_dict(), self.has_late, self.model.updates
        self.saved_model = copy.deepcopy([self.model.net.state_dict(), self.model.optimizer.state_dict()])

    def load(self):
        if self.saved is None or self.saved[1] != self.has_late:
            return
        self.step.load_state_dict(copy.deepcopy(self.saved[0]))
        for each, state in zip((self.model.net, self.model.optimizer), copy.deepcopy(self.saved_model), strict=True):
            each.load_state_dict(state)
        self.model.updates, self.model.open = self.saved[2], []
        self.take_buffers_of_the_first()

    def rebuild(self):
        self.step.rebuild()
        self.model.drop()
        self.take_buffers_of_the_first()

    def make_it_anew(self):
        self.step.close()
        self.model.drop()
        self.make()

    def compare(self):
        assert self.step.steps == self.model.updates
        for (name, mine), theirs in zip(self.net.named_parameters(), self.model.net.parameters(), strict=True):
            assert same(mine, theirs), name
        mine, theirs = state_of(self.net, self.optimizer), state_of(self.model.net, self.model.optimizer)
        assert all(same(mine[index], value) for index, value in theirs.items())
        assert float(self.net.calls) == self.calls


WAYS = (
    *[Process.call] * 8, Process.fail, Process.fail, Process.flush, Process.flush, Process.evaluate,
    Process.set_numbers, Process.set_accumulate, Process.add_a_group, Process.step_by_hand, Process.switch_mode,
    Process.freeze, Process.write_in_place, Process.write_in_one_process, Process.check, Process.save, Process.load,
    Process.rebuild, Process.make_it_anew,
)  # fmt: skip


def live(process, start):
    mine, done = Process(process, start), []
    for _ in range(DOINGS):
        doing = mine.draw.choice(WAYS)
        done.append(doing.__name__)
        try:
            doing(mine)
            mine.compare()
        except BaseException as error:
            raise AssertionError(f"process {process}, {mine.kind}, {mine.settings}: {' '.join(done)}") from error
    mine.step.join()
    mine.step.close()


@pytest.mark.parametrize("start", range(1, 7))
def test_processes_are_one_device_whatever_comes_between(start):
    run(live, start, processes=PROCESSES)
