"""A recorder of steps that has no GPU.

A real recording computes nothing; this one computes and puts everything back, and a replay computes again.
"""

import copy
import threading
import traceback
import weakref
from collections import Counter
from itertools import islice

import torch
from fakes.nets import cpu
from step.nets import Branches, mse
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_core import TrainStep
from mgpu_core.kernels import reference
from mgpu_core.optim import SGD, AdamW

OPTIMIZERS = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.01),
}


class OneWeight(nn.Module):
    """One weight, and an offset with running statistics: gradients are what the targets say."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.seen = nn.BatchNorm1d(1, affine=False)

    def forward(self, x):
        self.seen(x)
        return x @ self.weight


def total(output, target):
    return (output * target).sum()


def give_graphs(monkeypatch, kind):
    """Makes devices of this kind those that have graphs."""
    for index in ("devices.graphs", "step.cuda_graphs", "step.ranks"):
        monkeypatch.setattr(f"mgpu_core.{index}.GRAPH_DEVICE", kind)


class Recorder:
    """The recorder of one step.  Its log has each event in order; ``made`` has weak references to the replays."""

    def __init__(self, step):
        self.step, self.devices, self.made, self.log = step, [], [], []

    @property
    def records(self):
        return len(self.devices)

    def record(self, device, work):
        self.devices.append(device)
        self.log.append(f"record {device}")
        kept = [(each, each.clone()) for each in self._memory()]
        seen = Seen(device)
        try:
            with seen:
                results = work()
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
        statics = [torch.full_like(each, float("nan")) for each in results]
        assert all(each.device == device for each in statics)
        replay = Replay(work, statics, seen, self.log)
        self.made.append(weakref.ref(replay))
        return replay, statics

    def event(self):
        return Event(self.log)

    def forget(self):
        pass

    def _memory(self):
        """What a step writes: parameters and buffers, tables and states, on all devices; torch counts no write here."""
        ranks = self.step._ranks
        for row in ranks.replicas.parameters:
            yield from (each.data for each in row)
        for modules in ranks.modules:
            for module in modules.kept:
                yield from module.buffers()
        for flat in self.step._gradients.buckets.flats:  # to which a call of a window adds
            yield from flat.gradients
        optimizer_step = self.step._update.optimizer_step
        for device in optimizer_step.flat.devices if optimizer_step.is_flat else ():
            yield from (*device.segments, device.held_back, device.clip)
            yield from (each.data for flats in device.states.values() for each in flats)


class Seen(TorchDispatchMode):
    """What a graph would hold: operations of one device, in memory and with numbers that are fixed.

    Attributes:
        fixed: how often there was each operation with its numbers and the memory that was there before.
    """

    mgpu_core_thread_safe = True

    def __init__(self, device):
        super().__init__()
        self.device, self.fixed = device, Counter()
        self._made, self._lock = {}, threading.Lock()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        given = tree_leaves((args, kwargs))
        is_fixed = self._is_fixed(func, tensors_of([*given, *tree_leaves(found)]))
        with self._lock:
            if is_fixed:
                self.fixed[func, *map(self._index, given)] += 1
            there = set(map(pointer, tensors_of(given)))
            for each in tensors_of(tree_leaves(found)):
                if pointer(each) not in there:
                    self._made[pointer(each)] = each  # kept: nothing else gets its memory
        return found

    def _is_fixed(self, func, tensors):
        """Not what a kernel's plain reference does, which stands in for one that looks on the device."""
        if self.device.type != "cpu" and (func is WAITS or any(each.device != self.device for each in tensors)):
            assert by_a_kernel(), f"{func} waits for {self.device}, or leaves it: a graph cannot"
            return False
        return bool(tensors) and not by_a_kernel()  # a profiler's marks are none

    def _index(self, each):
        """A number, or the memory of a tensor, unless it was made in here."""
        if not isinstance(each, torch.Tensor):
            return str(each)
        return "made here" if pointer(each) in self._made else pointer(each)


def tensors_of(leaves):
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def pointer(tensor):
    return tensor.untyped_storage().data_ptr()


WAITS = torch.ops.aten._local_scalar_dense.default


def by_a_kernel():
    """Whether one of the last callers is a kernel's reference; torch has a few frames in between."""
    frames = islice(traceback.walk_stack(None), 12)
    return any(frame.f_globals.get("__name__") == reference.__name__ for frame, _ in frames)


class Event:
    """Recorded by each replay anew, as an external event is."""

    def __init__(self, log):
        self._log, self._event = log, None

    def record(self, stream):
        self._log.append(f"event {stream.device}")
        self._event = stream.record_event()

    def wait(self, stream):
        self._log.append(f"wait {stream.device}")
        stream.wait_event(self._event)


class Replay:
    def __init__(self, work, results, seen, log):
        self.work, self.results, self.seen, self._log = work, results, seen, log

    def replay(self):
        self._log.append(f"launch {self.seen.device}")
        with Seen(self.seen.device) as now:
            results = self.work()
        # On the CPU a step may ask what its numbers are.
        assert now.device.type == "cpu" or now.fixed == self.seen.fixed, (
            f"{now.fixed - self.seen.fixed}, not {self.seen.fixed - now.fixed}"
        )
        for static, result in zip(self.results, results, strict=True):
            static.copy_(result)


def recorder_of(step):
    """What records the step: there is no other way to it."""
    return step._captured.recorder


def without_gpu(step, recorder=None):
    """Return the step, with a recorder that needs no GPU."""
    step._captured.recorder = recorder or Recorder(step)
    return step


def step_of(net, optimizer, ranks=2, loss_fn=mse, **settings):
    settings = {"error_if_nonfinite": False} | settings
    return without_gpu(TrainStep(net, loss_fn, optimizer, cpu(ranks), capture=True, **settings))


def same(one, other, equal=torch.equal):
    return all(map(equal, one.parameters(), other.parameters()))


def pair(make, ranks=2, net=None, **settings):
    """Return two steps over equal nets: one records, one does not."""
    net = Branches().double() if net is None else net
    twin = copy.deepcopy(net)
    settings = {"workers": "threads"} | settings  # both in one way: the bits are compared
    captured = step_of(net, make(net.parameters()), ranks, **settings)
    plain = TrainStep(twin, mse, make(twin.parameters()), cpu(ranks), error_if_nonfinite=False, **settings)
    return captured, plain
