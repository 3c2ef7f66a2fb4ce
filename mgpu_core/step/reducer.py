"""Gradient sync: each bucket is summed over the ranks as soon as all of them have its gradients.

Autograd makes fresh gradients for every rank: nothing is zeroed, and nothing accumulates in a flat buffer.  A hook per
parameter and rank counts them.  A rank that has all of a bucket takes them away from its parameters.  The last rank of
a device adds up those of its ranks, in the flat memory of their sums, and the last one of all adds up the devices.
Each does so in the thread that runs its backward, while the others go on; no rank waits for another::

    rank 0, device 0   g3 ─ g2 [takes; adds up] ──────────────── g1 ─ g0 [takes; adds up]
    rank 1, device 1   g3 ────── g2 [takes; adds up; devices] ── g1 ── g0 [takes; adds up; devices]
    the caller         waits for both ...........................................  finish(): the rest, update

A gradient that comes after its rank's were taken, of a checkpoint that makes them twice, say, is added in the end.

On a GPU this runs on a side stream, which waits for the streams that the gradients were made on; the stream of the
update waits for it in :meth:`Reducer.finish`.  The gradients are kept until the ranks of the device have their next
bucket.  Then the streams that compute wait until they were read, by an event, and their memory can be used again::

    compute   [ g3 g2 ] ───── [ g1 g0 ] wait for the event; g3 g2 are let go ─
    side           wait [ adds ranks up ] event [ devices ]  wait [ adds ranks up ] ...
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from types import NoneType
from typing import TypeAlias

import torch

from mgpu_core.comm import dispatch
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.streams import SideStreams, caller_streams
from mgpu_core.devices.tensor_checks import LiesLike
from mgpu_core.kernels import FlatNorm
from mgpu_core.optim.flat_buffers import in_memory_order
from mgpu_core.step.grad_buckets import BackwardOrder, Columns, Communication, GradBuckets
from mgpu_core.step.grad_clip import GradientNorm, Sums, is_finite
from mgpu_core.step.param_hooks import ParameterHooks
from mgpu_core.step.process_sums import Weight
from mgpu_core.step.replicas import GradientHook, Replicas
from mgpu_core.step.rollback import uninterrupted
from mgpu_core.step.shards import Shards
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.events import ALL_RANKS
from mgpu_core.trace.tracer import current_step, in_step, mark, span

__all__ = ["Gradients", "OwnGradients", "Reducer"]

Updated: TypeAlias = Callable[[], Collection[int]]
Mark: TypeAlias = Callable[[int, torch.Stream], None]  # of a bucket, on the stream of a device's sums

_set_grad = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_grad_of, _hooks_of = attrgetter("grad"), attrgetter("_backward_hooks")


class Gradients:
    """The gradients of all ranks as autograd leaves them, to which the calls of a window add up.

    Args:
        replicas: the ranks' parameters.

    Attributes:
        buckets: where their sums lie; ``None``: there is no sum, and they stay where autograd makes them.
        hooks: of the user's on parameters, in a call of several ranks or micro-batches; ``None``: there are none.
    """

    buckets: GradBuckets | None = None
    hooks: ParameterHooks | None = None

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._aside: list[torch.Tensor | None] = []
        self._no_hooks = [None] * len(replicas.own)

    @property
    def sums(self) -> Sums:
        """The sums over all ranks, after :meth:`finish`."""
        raise NotImplementedError

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all sums together, a scalar on the first device."""
        raise NotImplementedError

    def not_finite(self) -> int | None:
        """Return the first parameter whose sum is NaN or infinite; waits for the devices."""
        raise NotImplementedError

    def begin(self, ranks: int, *, overlap: bool, goes_on: bool) -> None:
        """Begin a backward of so many ranks.

        Args:
            ranks: how many.
            overlap: buckets are summed as they become ready.
            goes_on: the gradients add to those of the calls before, which were set aside.
        """
        if goes_on:
            self._take_up()
        else:
            self.clear()
        if ranks > 1 and list(map(_hooks_of, self._replicas.own)) != self._no_hooks:
            self.hooks = ParameterHooks(self._replicas.parameters)

    def call_hooks(self, factor: float | torch.Tensor) -> None:
        """Call the user's hooks on the sums of a call's gradients; see :meth:`ParameterHooks.call`."""
        if self.hooks is not None:
            self.hooks.call(factor)
            self._end_hooks()

    def _end_hooks(self) -> None:
        if self.hooks is not None:
            self.hooks.give_back()
            self.hooks = None

    def finish(self, weight: Weight, updated: Updated) -> tuple[list[bool], Weight]:
        """Finish the sums after the backward of all ranks.

        Args:
            weight: of the gradients.
            updated: returns the parameters that the optimizer has.

        Returns:
            Per parameter whether any rank has used it, and the weight: of all processes, where there are several.
        """
        return self.used(), weight

    def show(self, used: Sequence[bool]) -> None:
        """Make the sums the ``grad`` of the user's parameters, and ``None`` that of parameters that no rank used."""

    def register_hooks(self) -> None:
        """Watch the gradients of all parameters that require grad; again after some were frozen or thawed."""

    def forget_layout(self) -> None:
        """Learn the order from the next backward again; values and gradients stay where they are."""

    def clear(self) -> None:
        """Drop all gradients."""
        for row in self._replicas.parameters:
            deque(map(_set_grad, row, repeat(None)), maxlen=0)

    def set_aside(self) -> None:
        """Keep the gradients between two calls of a window, where the user and ``zero_grad`` do not see them."""
        self._aside = list(map(_grad_of, self._replicas.own))
        for parameter in self._replicas.own:
            parameter.grad = None

    def _take_up(self) -> None:
        for parameter, gradient in zip(self._replicas.own, self._aside, strict=False):
            parameter.grad = gradient
        self._aside = []

    def abandon(self) -> None:
        """Drop all gradients after a failure."""
        self._end_hooks()
        self._aside = []
        self.clear()

    def cancel(self) -> None:
        """Make the hooks of a backward that failed, and may still run, do nothing."""

    def used(self) -> list[bool]:
        """Return per parameter whether any rank has a gradient of it."""
        flags = [map(is_not, map(_grad_of, row), repeat(None)) for row in self._replicas.parameters]
        return list(map(any, zip(*flags, strict=True))) if len(flags) > 1 else list(flags[0])

    def close(self) -> None:
        """Drop all gradients, and whatever was put on the parameters."""
        self.abandon()


class OwnGradients(Gradients):
    """The gradients of one rank alone: there is no sum, so they stay where autograd has made them."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        kinds = {(each.dtype, each.device) for each in replicas.own}
        is_one_kind = len(kinds) == 1 and replicas.own[0].dtype in FLOATING
        self._like = LiesLike(replicas.own) if is_one_kind else None
        self._norm: FlatNorm | None = None

    @property
    def sums(self) -> Sums:
        grads = {i: each.grad for i, each in enumerate(self._replicas.own) if each.grad is not None}
        dense = [each for each in grads.values() if not _is_sparse(each)]
        padding = [torch.empty(0, dtype=torch.int64)] * len(dense)
        return Sums([dense], [padding], dense, {i: each for i, each in grads.items() if _is_sparse(each)})

    def not_finite(self) -> int | None:
        grads = enumerate(map(_grad_of, self._replicas.own))
        return next((i for i, grad in grads if grad is not None and not is_finite(grad)), None)

    def norm(self) -> torch.Tensor:
        grads = list(map(_grad_of, self._replicas.own))
        if self._like is None or NoneType in set(map(type, grads)) or not self._like.holds_for(grads):
            sums = self.sums
            every_sum = [each.contiguous() for each in sums.every_sum]
            return GradientNorm(Sums(every_sum=every_sum, sparse=sums.sparse)).compute()
        if self._norm is None:
            values = [in_memory_order(each.detach(), each) for each in self._replicas.own]
            self._norm = FlatNorm(values, keeps=False)  # the values may move
        return self._norm.compute(grads)


class Reducer(Gradients):
    """The gradients of several ranks, and their sums.

    Args:
        replicas: the ranks' parameters.
        communication: how buckets are cut and summed.
        cut: parameters in shards; ``None``: they are whole.

    Attributes:
        communication: the same.
        buckets: where the sums lie; empty before the first backward.
        handles: of the hooks on parameters, by rank and parameter.
    """

    buckets: GradBuckets
    _collective = "all_reduce"  # what a recording calls the sums
    _fewest = 2  # buckets, for which gradients are counted: a single one is summed when backward is over

    def __init__(self, replicas: Replicas, communication: Communication, cut: Shards | None = None) -> None:
        super().__init__(replicas)
        self.communication = communication
        self.buckets = GradBuckets(replicas, None, communication, cut)
        self._is_learning = False
        self._whole_step = current_step()
        self._ready: list[int] = []  # parameters, in the order of their first gradients on rank 0
        self.handles: dict[tuple[int, int], torch.utils.hooks.RemovableHandle] = {}
        # A function over handles alone: what it holds, lives as long as the process.
        self._remove_hooks = weakref.finalize(self, _remove_all, self.handles)
        self._lock = threading.Lock()
        self._missing: list[list[float]] = []  # per rank and bucket the gradients to come, of a backward that counts
        self._device_of = [replicas.devices.index(device) for device in replicas.team.devices]
        self._ranks_on: list[int] = []  # per device, of such a backward
        self._taken: dict[tuple[int, int], Columns] = {}  # by bucket and device, until all of its ranks have theirs
        self._added: dict[int, set[int]] = {}  # by bucket whose sum has begun, the devices whose ranks are added up
        self._held: set[int] = set()  # buckets that are summed after the backward
        self._most_ranks = 0  # of the calls of a window
        self._mark: Mark | None = None  # of a recording
        self._adds = False  # of one: what it sums is added to the sums that are there
        self._kept: set[int] | None = None  # parameters whose gradients, of the calls before, the devices' sums hold
        self._summed: set[int] = set()
        self._used: set[int] = set()  # parameters of which a rank had a gradient
        self._indices, self._device_indices = range(len(replicas.own)), range(len(replicas.devices))
        self._side = SideStreams(replicas.devices)
        self._has_streams = any(device.type != "cpu" for device in replicas.devices)
        self.register_hooks()

    @property
    def sums(self) -> Sums:
        return self.buckets.sums

    def norm(self) -> torch.Tensor:
        return self.buckets.norm.compute()

    def not_finite(self) -> int | None:
        return self.buckets.not_finite()

    def register_hooks(self) -> None:
        buckets = self.buckets.buckets
        parameters = self._replicas.own
        self._expected = [sum(parameters[each.parameter].requires_grad for each in of.segments) for of in buckets]
        if not self.buckets.is_empty and len(buckets) < self._fewest:
            _remove_all(self.handles)
            return
        me = weakref.ref(self)
        for rank, row in enumerate(self._replicas.parameters):
            for i, parameter in enumerate(row):
                if parameter.requires_grad and (rank, i) not in self.handles:
                    hook = GradientHook(partial(_accumulated, me, rank, i))
                    self.handles[rank, i] = parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, ranks: int, *, overlap: bool, goes_on: bool) -> None:
        super().begin(ranks, overlap=overlap, goes_on=goes_on)
        kept, self._kept = self._kept, None
        if not goes_on or kept is not None:
            self._summed, self._used, self._taken, self._added, self._most_ranks = set(), set(), {}, {}, 0
        if goes_on and kept is not None:
            self._give_back(kept)
        if self._has_streams:
            devices = self._replicas.team.devices
            self._side.starts(devices, caller_streams(devices))
        self._is_learning = True
        self._held = set()
        if self._most_ranks < ranks:
            self._most_ranks = ranks
        if self.handles:
            if overlap and ranks == self._most_ranks:  # others may have gradients of an earlier call
                expected: list[float] = [*self._expected]
                self._ranks_on = [sum(rank < ranks for rank in of) for of in self._replicas.ranks_of]
                if self.hooks is not None:  # their buckets are not complete before the hooks are called
                    late = {self.buckets.bucket_of.get(i) for i in self.hooks.indices}
                    expected = [math.inf if bucket in late else count for bucket, count in enumerate(expected)]
                self._missing = [list(expected) for _ in range(ranks)]
            self._whole_step = current_step()  # autograd has threads of its own, which do not know it

    def cancel(self) -> None:
        """Make the hooks of a backward that failed, and may still run, do nothing."""
        self._ready, self._mark, self._adds = [], None, False
        self._rest()

    def _rest(self) -> None:
        """Ignore the backwards between two steps: they are the user's own."""
        self._is_learning, self._missing = False, []

    def set_aside(self) -> None:
        """Keep the gradients between two calls of a window, where the user and ``zero_grad`` do not see them."""
        self._rest()
        super().set_aside()

    def abandon(self) -> None:
        """Drop all gradients after a failure."""
        self._kept = None
        self.drop()

    def drop(self) -> None:
        """Drop the gradients of a backward that failed, when no side stream reads them any more."""
        self._side.joins()
        self._taken, self._added = {}, {}
        self.buckets.drop()
        super().abandon()

    def close(self) -> None:
        """Drop all gradients, and take the hooks away."""
        self._remove_hooks()
        self.abandon()

    def _accumulated(self, rank: int, i: int) -> None:
        """Count a gradient; in the thread of a backward, called by autograd."""
        if self.buckets.is_empty:
            if rank == 0 and self._is_learning:
                self._ready.append(i)
            return
        bucket = self.buckets.bucket_of.get(i)
        if bucket is None:
            return
        self._side.made_on_current(self._replicas.team.devices[rank])
        counted = self._missing
        if rank < len(counted):
            missing = counted[rank]
            missing[bucket] -= 1
            if not missing[bucket]:
                with in_step(self._whole_step):
                    self._complete(rank, bucket)
            elif missing[bucket] < 0:  # a checkpoint makes gradients twice: the sum waits for the end, if it can
                self._held.add(bucket)

    def _complete(self, rank: int, bucket: int) -> None:
        """Take a rank's gradients of a bucket, and add up what that makes complete: its device's, and all."""
        mark("ready", rank, self._replicas.team.devices[rank], bucket)
        index, gradients = self._device_of[rank], self._take(rank, bucket)
        with self._lock:
            added = self._begin_sum(bucket)
            columns = self._taken.setdefault((bucket, index), {})
            columns[rank] = gradients or self.buckets.nothing[bucket]
            if len(columns) < self._ranks_on[index] or bucket in self._held:
                return
            del self._taken[bucket, index]
        self._add_ranks(bucket, index, columns)
        with self._lock:
            added.add(index)
            if self._mark is not None or len(added) < sum(map(bool, self._ranks_on)) or bucket in self._held:
                return
        for other, count in enumerate(self._ranks_on):
            if not count:  # no rank of it has rows: its sum is zero
                self._add_ranks(bucket, other, {})
        self._add_devices(bucket)

    def _take(self, rank: int, bucket: int) -> list[torch.Tensor | None] | None:
        """Take a rank's gradients of a bucket away from its parameters, and return them, or ``None`` if it has none."""
        members, leaves = self.buckets.members[bucket], self.buckets.leaves[bucket][rank]
        gradients: list[torch.Tensor | None] = list(map(_grad_of, leaves))
        kinds = set(map(type, gradients))
        if NoneType not in kinds:
            self._used |= set(members)
        elif len(kinds) == 1:
            return None
        else:
            self._used |= {i for i, gradient in zip(members, gradients, strict=True) if gradient is not None}
        deque(map(_set_grad, leaves, repeat(None)), maxlen=0)
        return gradients

    def finish(self, weight: Weight, updated: Updated) -> tuple[list[bool], Weight]:
        self._replicas.settle()  # a forward may have assigned `parameter.data`
        if self.buckets.is_empty:
            self._lay_out(updated())
        self.sum_the_rest()
        used = self.used()
        if self.communication.processes is not None:
            weight, used = self.buckets.finish_processes(self.communication.processes, weight, used)
        return used, weight

    def used(self) -> list[bool]:
        """Return per parameter whether any rank had a gradient of it, after the sums."""
        return list(map(self._used.__contains__, self._indices))

    def sum_the_rest(self) -> None:
        """Sum the buckets that are not summed yet, and add gradients that came again, or later than counted."""
        buckets = self.buckets
        is_through = self._summed == buckets.numbers and not self._added
        is_through = is_through and set(map(type, map(_grad_of, self._replicas.leaves))) <= {NoneType}
        for bucket in () if is_through else buckets.numbers:
            late = list(map(self._take, self._replicas.team.ranks, repeat(bucket)))
            if bucket in self._summed and bucket not in self._added and set(map(type, late)) == {NoneType}:
                continue
            self._begin_sum(bucket)
            for index in self._device_indices:
                self._add_the_rest(bucket, index, late)
            self._add_devices(bucket)
        if buckets.sparse:
            used = super().used()
            with span("reduce"):
                buckets.sums.sparse = {i: self._sum_sparse(i) for i in buckets.sparse if used[i]}
            self._used.update(buckets.sums.sparse)
        if self._has_streams:
            self._side.joins()
        self._is_learning, self._missing = False, []

    def _add_the_rest(self, bucket: int, index: int, late: Sequence[list[torch.Tensor | None] | None]) -> None:
        """Add up a device's gradients of a bucket that are not in its sum yet: those taken, and late ones by rank."""
        added, taken = self._added[bucket], self._taken
        columns = taken.pop((bucket, index)) if (bucket, index) in taken else Columns()
        for rank in self._replicas.ranks_of[index]:
            gradients = late[rank]
            if gradients is not None:
                columns[rank] = _sums_of(columns[rank], gradients) if rank in columns else gradients
        if columns or index not in added:
            self._add_ranks(bucket, index, columns, goes_on=index in added)

    def keep(self) -> None:
        """Add the gradients of the calls before up in the sums of their devices, each of which has one rank."""
        if self._kept is not None:
            return
        self.begin(len(self._replicas.team), overlap=False, goes_on=True)
        for bucket in self.buckets.numbers:
            for index, (rank,) in enumerate(self._replicas.ranks_of):
                gradients = self._take(rank, bucket)
                self._add_ranks(bucket, index, {} if gradients is None else {rank: gradients})
        self._side.joins()
        self._kept = self._used
        self._rest()

    def _give_back(self, kept: set[int]) -> None:
        """Give the gradients of these parameters, which the sums of their devices hold, back to the ranks."""
        for flat, (rank,) in zip(self.buckets.flats, self._replicas.ranks_of, strict=True):
            for i in kept:
                self._replicas.parameters[rank][i].grad = flat.gradient_views[i].clone()
        self._most_ranks = len(self._replicas.team)

    def begin_recording(self, index: int, ranks: int, mark: Mark, *, goes_on: bool) -> None:
        """Begin a backward of the ranks of one device, in a recording; the devices are added up after a replay of it.

        Args:
            index: of the device.
            ranks: of all devices.
            mark: called with a bucket and the stream on which the ranks of the device were added up.
            goes_on: the gradients add to those of the calls before, see :meth:`keep`.
        """
        kept = self._kept
        self.begin(ranks, overlap=True, goes_on=False)
        device, self._mark, self._adds, self._kept = self._replicas.devices[index], mark, goes_on, kept
        self._side.starts([device], caller_streams([device]))

    def end_recording(self, index: int) -> set[int]:
        """End it; return the parameters of which a rank of the device had a gradient."""
        for bucket in self.buckets.numbers:
            self._begin_sum(bucket)
            self._add_the_rest(bucket, index, list(map(self._take, self._replicas.team.ranks, repeat(bucket))))
        self._side.joins()
        self._mark, self._adds = None, False
        self._rest()
        return self._used

    def add_replayed(self, order: Sequence[int], used: set[int], wait: Mark, *, collects: bool) -> None:
        """Add up the devices, on their side streams, after graphs that add up the ranks of each were launched.

        Args:
            order: the buckets, as they become ready.
            used: parameters of which a rank had a gradient.
            wait: called with a bucket and the side stream of each device, makes it wait for the ranks of this device.
            collects: the devices are added up after a call to come.
        """
        kept = self._kept or set()
        self.begin(len(self._replicas.team), overlap=False, goes_on=False)
        self._used |= used | kept
        if collects:
            self._kept = self._used
            self._rest()
            return
        self._summed |= set(order)
        streams = list(map(self._side.summing, self._replicas.devices))
        with self._side.entered():
            for bucket in order:
                deque(map(wait, repeat(bucket), streams), maxlen=0)
                if tracer.recording is not None:
                    self.buckets.tell(bucket)
                with span(self._collective, ALL_RANKS, None, bucket) if tracer.sink else NULL_CONTEXT:
                    self.buckets.add_devices(bucket)

    def show(self, used: Sequence[bool]) -> None:
        if self.communication.shards > 1:  # no device has a whole one
            self.clear()
            return
        shown, sparse = self.buckets.shown, self.buckets.sums.sparse
        if sparse:
            shown = [sparse.get(i, view) for i, view in enumerate(shown)]
        for parameter, view, is_used in zip(self._replicas.own, shown, used, strict=True):
            parameter.grad = view if is_used else None

    def _lay_out(self, updated: Collection[int]) -> None:
        """Lay out the buckets after the first backward, in all processes after that of process 0."""
        learnt, processes = self._learnt(updated), self.communication.processes
        if processes is not None:
            if learnt.sparse:
                raise TypeError(
                    "some gradients are sparse: they can be summed inside one process only, so make them dense"
                )
            learnt = processes.from_first(learnt)
        with uninterrupted():
            self.buckets = GradBuckets(self._replicas, learnt, self.communication)
            self.buckets.take_values()
            self.register_hooks()
            self._is_learning = False

    def _learnt(self, updated: Collection[int]) -> BackwardOrder:
        """Return the order that the first backward has shown; the optimizer has the parameters ``updated``.

        Parameters that have gradients are wanted even if they were frozen since.  Several processes cannot lay out
        again when a parameter is thawed, so all of the optimizer's are in their buckets from the start.
        """
        rows = self._replicas.parameters
        sparse = [i for i in range(len(rows[0])) if any(_is_sparse(row[i].grad) for row in rows)]
        known = updated if self.communication.processes is not None else ()
        used = super().used()
        wanted = [i for i, each in enumerate(self._replicas.own) if each.requires_grad or used[i] or i in known]
        return BackwardOrder(list(dict.fromkeys(self._ready)), sparse, wanted, updated)

    def forget_layout(self) -> None:
        if self._kept is not None:
            self._give_back(self._kept)
            self._kept = None
        self.buckets, self._ready = GradBuckets(self._replicas, None, self.communication), []
        self.register_hooks()
        self._rest()

    def _begin_sum(self, bucket: int) -> set[int]:
        """Begin a sum, which is added to the one before, if there is one; return the devices whose ranks are in it."""
        if bucket not in self._added:
            if bucket in self._summed:
                processes = self.buckets.processes
                if processes is not None and processes.has_begun(bucket):
                    raise RuntimeError(
                        f"gradients of {', '.join(self.buckets.names(bucket))} came when their sum over the processes "
                        "had begun: a reentrant torch.utils.checkpoint makes them twice; use_reentrant=False does not"
                    )
                with self._side.entered():
                    self.buckets.set_aside(bucket)
            self._added[bucket] = set()
        return self._added[bucket]

    def _add_ranks(self, bucket: int, index: int, columns: Columns, *, goes_on: bool = False) -> None:
        """Sum a bucket over the ranks of a device; on a GPU on its side stream.

        Args:
            bucket: its number.
            index: of the device.
            columns: by rank its gradients of the bucket's parameters.
            goes_on: they are added to those of the device that are in this sum.
        """
        goes_on = goes_on or self._adds
        if not self._has_streams and tracer.sink is None:
            self.buckets.add_ranks(bucket, index, columns, goes_on=goes_on)
            return
        device = self._replicas.devices[index]
        self._side.let_go(device)
        with span(self._collective, ALL_RANKS, None, bucket), self._side.after_ranks(device):
            self.buckets.add_ranks(bucket, index, columns, goes_on=goes_on)
            self._side.keep(device, columns)
            if self._mark is not None:
                self._mark(bucket, self._side.summing(device))

    def _add_devices(self, bucket: int) -> None:
        """Sum a bucket over the devices, each of which has the sum over its ranks; on GPUs on their side streams."""
        if tracer.recording is not None:
            self.buckets.tell(bucket)
        has_devices = self.buckets.has_devices
        if has_devices or bucket in self._summed:
            whole = span(self._collective, ALL_RANKS, None, bucket) if has_devices else NULL_CONTEXT
            with whole, self._side.entered():
                self.buckets.add_devices(bucket)
        if self.buckets.processes is not None:
            self.buckets.processes.put(bucket)
        self._summed |= {bucket}
        del self._added[bucket]

    def _sum_sparse(self, i: int) -> torch.Tensor:
        parts = [row[i].grad for row in self._replicas.parameters]
        return dispatch.reduce_batch([parts], "sum", self._replicas.devices[0])[0]


def _accumulated(reducer_ref: weakref.ref[Reducer], rank: int, i: int) -> None:
    reducer = reducer_ref()
    if reducer is not None:
        reducer._accumulated(rank, i)


def _remove_all(handles: dict[tuple[int, int], torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


def _sums_of(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the sums of a rank's gradients that came twice."""
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
