"""Gradients of parameters in shards: each device keeps the sums of its parts, and ranks let go of their own at once.

A rank that has all gradients of a bucket takes them, in the thread of its backward; who comes last adds them up and
scatters the sum, in the order of ranks.  A rank that is ahead waits for the others::

    rank 0   g3 g2 [takes] ──────── g1 g0 [takes; adds up, scatters] ──
    rank 1   g3 ── g2 [takes; adds up, scatters] ── g1 ─ g0 [takes] ───
    parts    device 0: a half of g3 g2, of g1 g0;  device 1: the other halves

A gradient that comes later, of a checkpoint that makes gradients twice, say, is added after the backward.  So are the
calls of a window to those before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter

import torch

from mgpu_core.devices.transfer import used_here
from mgpu_core.step.grad_buckets import Communication
from mgpu_core.step.ranks import Ranks
from mgpu_core.step.reducer import Gradients, OwnGradients, Reducer, Updated, Weight
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace.events import ALL_RANKS
from mgpu_core.trace.tracer import in_step, span

__all__ = ["CutGradients", "gradients_of"]

_grad_of = attrgetter("grad")


class CutGradients(Reducer):
    """The gradients of ranks whose parameters are in shards.

    Args:
        ranks: of the step.
        communication: how buckets are summed.
    """

    _fewest = 0

    def __init__(self, ranks: Ranks, communication: Communication) -> None:
        assert ranks.shards is not None
        self._ranks, self._shards = ranks, ranks.shards
        self._lock = threading.Lock()
        self._is_open = False  # the gradients of now are a step's, and not the user's own
        self._count = 0  # of the ranks that run a backward
        self._missing: list[list[int]] = []  # per rank and bucket, of a backward
        self._taken: dict[int, dict[int, list[torch.Tensor | None]]] = {}  # by bucket and rank
        self._late: frozenset[int] = frozenset()  # buckets with hooks of the user's, which see whole sums
        self._summed: set[int] = set()  # buckets whose parts hold sums of this window
        self._used: set[int] = set()
        super().__init__(ranks.replicas, communication, ranks.shards)

    def begin(self, ranks: int, *, overlap: bool, goes_on: bool) -> None:
        super().begin(ranks, overlap=False, goes_on=goes_on)
        self.clear()  # also of a backward of the user's own between two calls of a window
        if not goes_on:
            self._forget()
        if self.hooks is not None:
            self._late = frozenset(self.buckets.bucket_of[i] for i in self.hooks.indices if i in self.buckets.bucket_of)
        self._count, self._missing = ranks, [list(self._expected) for _ in range(ranks)]
        self._is_open, self._in_turns = True, self._ranks.in_turns

    def _forget(self) -> None:
        self._taken, self._summed, self._used, self._late = {}, set(), set(), frozenset()

    def _rest(self) -> None:
        super()._rest()
        self._is_open = False

    def _accumulated(self, rank: int, i: int) -> None:
        """Count a gradient; in the thread of a backward, called by autograd."""
        bucket = self.buckets.bucket_of.get(i)
        if bucket is None or not self._is_open or rank >= self._count:
            return
        if self._has_streams:
            self._side.made_on_current(self._replicas.team.devices[rank])
        self._missing[rank][bucket] -= 1
        if self._missing[rank][bucket] or bucket in self._late:
            return
        taken = self._take(rank, bucket)
        with self._lock:
            columns = self._taken.setdefault(bucket, {})
            columns[rank] = taken
            is_complete = len(columns) == self._count or self._in_turns
            if is_complete:
                del self._taken[bucket]
        if is_complete:
            with in_step(self._whole_step):
                self._add_up(bucket, columns)
            self._shards.pace.went_on()
        else:
            self._shards.pace.wait(rank, lambda: bucket not in self._taken)

    def _take(self, rank: int, bucket: int) -> list[torch.Tensor | None]:
        """Take a rank's gradients of a bucket away from its parameters."""
        row, members = self._replicas.parameters[rank], self.buckets.members(bucket)
        taken = [row[i].grad for i in members]
        for i, gradient in zip(members, taken, strict=True):
            row[i].grad = None
            if gradient is None:
                continue
            self._used.add(i)
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {self._replicas.names[i]} is sparse, and the kernels update whole buffers: build "
                    "the layer with sparse=False"
                )
        return taken

    def _add_up(self, bucket: int, columns: dict[int, list[torch.Tensor | None]]) -> None:
        """Add the gradients of some ranks to the parts; on GPUs on their side streams."""
        nothing: list[torch.Tensor | None] = [None] * len(self.buckets.members(bucket))
        taken = [columns.get(rank, nothing) for rank in self._replicas.team.ranks]
        side = self._side.entered() if self._has_streams else NULL_CONTEXT
        with span("reduce_scatter", ALL_RANKS, None, bucket), side:
            self.buckets.add_to_parts(bucket, taken, is_first=bucket not in self._summed)
            if self._has_streams:
                used_here([gradient for of_rank in taken for gradient in of_rank if gradient is not None])
        self._summed.add(bucket)

    def _end_call(self) -> None:
        """Add the gradients that ranks still have: of buckets that were not complete, or that came twice."""
        is_through = not self._taken and set(map(_grad_of, self._shards.leaves)) <= {None}
        for bucket in () if is_through else range(len(self.buckets.buckets)):
            earlier = self._taken.pop(bucket, {})
            later: dict[int, list[torch.Tensor | None]] = {}
            for rank in self._replicas.team.ranks:
                gradients = self._take(rank, bucket)
                if any(gradient is not None for gradient in gradients):
                    (later if rank in earlier else earlier)[rank] = gradients
            for columns in (earlier, later):
                if columns:
                    self._add_up(bucket, columns)
        if self._has_streams:
            self._side.joins()

    def set_aside(self) -> None:
        """Add the gradients of a call to the parts, before the next one of the window."""
        self._end_call()
        self._rest()

    def finish(self, weight: Weight, updated: Updated) -> tuple[list[bool], Weight]:
        self._replicas.settle()  # a forward may have assigned `parameter.data`
        self._end_call()
        self._rest()
        for bucket in set(range(len(self.buckets.buckets))) - self._summed:
            for parts in self.buckets.sums.parts:
                parts[bucket].zero_()
        used, processes = self.used(), self.communication.processes
        if processes is not None:
            for message in range(len(self.buckets.sums.every_sum)):
                processes.put(message)
            weight, used = processes.finish(weight, used)
        return used, weight

    def not_finite(self) -> str | None:
        return self.buckets.not_finite()

    def used(self) -> list[bool]:
        """Return per parameter whether any rank had a gradient of it."""
        return [i in self._used for i in range(len(self._replicas.own))]

    def show(self, used: Sequence[bool]) -> None:
        self.clear()  # no device has a whole one

    def cancel(self) -> None:
        self._is_open = False
        super().cancel()

    def abandon(self) -> None:
        self._forget()
        super().abandon()


def gradients_of(ranks: Ranks, communication: Communication) -> Gradients:
    """Return the gradients of a step's ranks; those of one rank alone stay where they are, unless they are recorded."""
    options = communication.options
    if ranks.shards is not None:
        return CutGradients(ranks, communication)
    if len(options.team) == 1 and communication.processes is None and not options.capture:
        return OwnGradients(ranks.replicas)
    return Reducer(ranks.replicas, communication)
