"""Gradient sync: each bucket is summed over the ranks as soon as all of them have its gradients.

Autograd hands every rank fresh gradients, which stay where it made them: nothing is zeroed and nothing accumulates
into a flat buffer.  A hook per parameter and rank counts; the last rank to complete a bucket adds the ranks' gradients
of each device straight into the device's bucket (one pass), and all-reduces the bucket over the devices, while the
other ranks, and its own device, go on with their backward.  Nobody waits for anybody in there.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from types import NoneType

import torch

from mgpu_core.comm import dispatch
from mgpu_core.device.dtypes import FLOATING
from mgpu_core.device.streams import SideRoad, caller_streams
from mgpu_core.device.tensor_checks import LiesLike
from mgpu_core.entries import ALL_RANKS
from mgpu_core.kernels import FlatNorm
from mgpu_core.nothing import NOTHING
from mgpu_core.optim.flat_buffers import in_memory_order
from mgpu_core.processes.group import Processes
from mgpu_core.record import current_step, in_step, is_on, mark, span
from mgpu_core.train.bucket_sums import BetweenDevices
from mgpu_core.train.grad_clip import GradientNorm, Sums
from mgpu_core.train.laid_out import LaidOut, Learnt
from mgpu_core.train.replicas import GradientHook, Replicas
from mgpu_core.train.rounds import Round

__all__ = ["GradientSync", "Gradients", "OwnGradients"]


_grad_of = attrgetter("grad")
_NO_ROUND = Round((), 0, 0)  # between two backwards


class Gradients:
    """The gradients of all ranks as autograd leaves them, which a window's calls add up to.

    Args:
        replicas: the ranks' parameters.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._aside: list[torch.Tensor | None] = []

    def clear(self, ranks: Sequence[int] | None = None) -> None:
        """Forget all gradients, or those of some ranks."""
        rows = self._replicas.parameters
        for row in rows if ranks is None else [rows[rank] for rank in ranks]:
            for parameter in row:
                parameter.grad = None

    def set_aside(self) -> None:
        """Between two calls of a window: take the gradients so far out of the user's sight, and of ``zero_grad``'s."""
        self._aside = [parameter.grad for parameter in self._replicas.own]
        for parameter in self._replicas.own:
            parameter.grad = None

    def take_up(self) -> None:
        """Put them back."""
        for parameter, gradient in zip(self._replicas.own, self._aside, strict=False):
            parameter.grad = gradient
        self._aside = []

    def abandon(self) -> None:
        """After a failure: forget all gradients."""
        self._aside = []
        self.clear()

    def cancel(self) -> None:
        """Make the hooks of a backward that failed, and maybe still runs, do nothing."""

    def used(self) -> list[bool]:
        """Return per parameter whether any rank has a gradient of it."""
        rows = [list(map(is_not, map(_grad_of, row), repeat(None))) for row in self._replicas.parameters]
        return list(map(any, zip(*rows, strict=True))) if len(rows) > 1 else rows[0]


class OwnGradients(Gradients):
    """The gradients of one rank alone: nobody sums them, so they stay where autograd has made them."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        kinds = {(each.dtype, each.device) for each in replicas.own}
        is_one_kind = len(kinds) == 1 and replicas.own[0].dtype in FLOATING
        self._like = LiesLike(replicas.own) if is_one_kind else None
        self._norm: FlatNorm | None = None

    @property
    def sums(self) -> Sums:
        """The gradients that there are, as :class:`Sums`."""
        found = [each.grad for each in self._replicas.own]
        dense = [each for each in found if each is not None and not _is_sparse(each)]
        nothing = [torch.empty(0, dtype=torch.int64)] * len(dense)
        return Sums(
            [dense],
            [nothing],
            dense,
            {i: each for i, each in enumerate(found) if each is not None and _is_sparse(each)},
        )

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all gradients together, a scalar on their device."""
        found = list(map(_grad_of, self._replicas.own))
        if self._like is None or NoneType in set(map(type, found)) or not self._like.holds_for(found):
            sums = self.sums
            return GradientNorm(
                Sums(every_sum=[each.contiguous() for each in sums.every_sum], sparse=sums.sparse)
            ).compute()
        if self._norm is None:
            self._norm = FlatNorm([in_memory_order(each.detach(), each) for each in self._replicas.own])
        return self._norm.compute(found)


class GradientSync(Gradients):
    """The gradients of several ranks, and their sums.

    Args:
        replicas: the ranks' modules.
        bucket_nbytes: how many bytes travel together.
        algorithm: of the all-reduce between devices.
        comm_dtype: what gradients are cast to for the way between devices and processes; ``None``: their own.
        in_shards: each device gets the sums of its part of each bucket, and need not have the others.
        processes: that train with this one; ``None``: it is alone.

    Attributes:
        between: how buckets are summed over the devices.
        layout: where they lie, and their sums; empty before the first backward.
    """

    def __init__(
        self,
        replicas: Replicas,
        bucket_nbytes: int,
        algorithm: str,
        comm_dtype: torch.dtype | None,
        in_shards: bool = False,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(replicas)
        self._processes = processes
        self._bucket_nbytes, self._comm_dtype = bucket_nbytes, comm_dtype
        group = None if processes is None else processes.group
        shards = len(replicas.devices) if in_shards else 1
        firsts = [ranks[0] for ranks in replicas.ranks_of]
        self.between = BetweenDevices(algorithm, comm_dtype, shards, group, firsts)
        self.layout = self._laid_out(None)
        self._is_learning = False
        self._whole_step = current_step()
        self._ready: list[int] = []  # parameters, in the order of their first gradients on rank 0
        self.handles: dict[tuple[int, int], torch.utils.hooks.RemovableHandle] = {}
        self._round = _NO_ROUND
        self._side = SideRoad(replicas.devices)
        self._has_streams = any(device.type != "cpu" for device in replicas.devices)
        self.watch_parameters()

    @property
    def sums(self) -> Sums:
        """The sums over all ranks, after :meth:`finish`."""
        return self.layout.sums

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all sums together, a scalar on the first device."""
        return self.layout.norm.compute()

    def watch_parameters(self) -> None:
        """Hooks all parameters that require grad; again after some were frozen or thawed.

        One bucket alone is complete when backward is over: its gradients are taken then, and no backward stops for
        Python.
        """
        self._count_expected()
        if not self.layout.is_empty and len(self.layout.buckets) < 2:
            for handle in self.handles.values():
                handle.remove()
            self.handles.clear()
            return
        me = weakref.ref(self)
        for rank, row in enumerate(self._replicas.parameters):
            for i, parameter in enumerate(row):
                if parameter.requires_grad and (rank, i) not in self.handles:
                    hook = GradientHook(partial(_accumulated, me, rank, i))
                    self.handles[rank, i] = parameter.register_post_accumulate_grad_hook(hook)

    def _count_expected(self) -> None:
        """Find out how many gradients each bucket waits for, of each rank."""
        self._uncounted = Round((), 0, len(self.layout.buckets))  # of a backward whose buckets are summed behind it
        parameters = self._replicas.parameters[0]
        self._expected = [
            sum(parameters[each.parameter].requires_grad for each in bucket.segments) for bucket in self.layout.buckets
        ]

    def begin(self, ranks: int, *, overlap: bool) -> None:
        """Before a backward of so many ranks; ``overlap``: its buckets are summed as they become ready."""
        is_counted = overlap and self.handles
        self._round = Round(self._expected, ranks, len(self._expected)) if is_counted else self._uncounted
        if self._has_streams:
            devices = self._replicas.team.devices
            self._side.starts(devices, caller_streams(devices))
        self._is_learning = True
        if self.handles:
            self._whole_step = current_step()  # autograd has threads of its own, which do not know it

    def cancel(self) -> None:
        """Makes the hooks of a backward that failed, and maybe still runs, do nothing."""
        self._ready = []
        self._rest()

    def _rest(self) -> None:
        """Between two backwards: one of the user's own is none of ours."""
        self._is_learning = False
        self._round = _NO_ROUND

    def set_aside(self) -> None:
        """Between two calls of a window: take the gradients so far out of the user's sight, and of ``zero_grad``'s."""
        self._rest()
        super().set_aside()

    def abandon(self) -> None:
        """After a failure: forget all gradients, when nothing beside the computing reads them any more."""
        self._side.joins()
        super().abandon()

    def _accumulated(self, rank: int, i: int) -> None:
        if self.layout.is_empty:
            if rank == 0 and self._is_learning:
                self._ready.append(i)
            return
        bucket = self.layout.bucket_of.get(i)
        if bucket is None:
            return
        self._side.made_on_current(self._replicas.team.devices[rank])
        is_complete = self._round.is_complete(rank, bucket)
        is_told = is_on() and self._round.has_all_of(rank, bucket)
        if is_told or is_complete:
            with in_step(self._whole_step):
                if is_told:
                    mark("ready", rank, self._replicas.team.devices[rank], bucket)
                if is_complete:
                    self._sum(bucket)

    def multiply_parts(self, factor: float) -> None:
        """Each rank's own gradients by one number, before they are summed."""
        found = [parameter.grad for row in self._replicas.parameters for parameter in row if parameter.grad is not None]
        with torch.no_grad():
            for gradient in found:
                gradient.mul_(factor)

    def finish(self) -> None:
        """After the backward of all ranks: sums what is left.

        The sums lie in ``layout``; each rank still has its own gradients.
        """
        for bucket in self._round.left():
            if self.layout.outbox is not None and self.layout.outbox.has_sent(bucket):
                names = ", ".join(self.layout.of_buckets.names(bucket))
                raise RuntimeError(
                    f"gradients of {names} came after their sum had left for the other processes: a "
                    "reentrant torch.utils.checkpoint makes them twice; use_reentrant=False does not"
                )
            self._sum(bucket)
        used = self.used() if self.layout.loose else ()
        if self.layout.loose:
            with span("reduce"):
                self.layout.sums.sparse = {i: self._sum_loose(i) for i in self.layout.loose if used[i]}
        if self._has_streams:
            self._side.joins()
        self._rest()

    def show(self, used: Sequence[bool]) -> None:
        """Makes the sums the ``grad`` of the user's parameters; of those that no rank used it is ``None``.

        Sums in shards are on no device as a whole, and are not shown.
        """
        if self.between.shards > 1:
            self.clear()
            return
        shown = self.layout.shown
        if self.layout.sums.sparse:
            shown = [self.layout.sums.sparse.get(i, view) for i, view in enumerate(shown)]
        for parameter, view, is_used in zip(self._replicas.own, shown, used, strict=True):
            parameter.grad = view if is_used else None

    def learnt(self, updated: Collection[int]) -> Learnt:
        """After the first backward; the optimizer has the parameters in the places ``updated``.

        What has gradients is wanted even if it was frozen since.  Several processes cannot lay out again when a
        parameter is thawed, so they have the optimizer's in the buckets from the start.
        """
        rows = self._replicas.parameters
        loose = [i for i in range(len(rows[0])) if any(_is_sparse(row[i].grad) for row in rows)]
        known = updated if self._processes is not None else ()
        used = self.used()
        wanted = [i for i, each in enumerate(self._replicas.own) if each.requires_grad or used[i] or i in known]
        return Learnt(list(dict.fromkeys(self._ready)), loose, wanted, updated)

    def lay_out(self, learnt: Learnt) -> None:
        """Gives the parameters their memory."""
        layout = self._laid_out(learnt)
        layout.take_values()
        self.layout = layout
        self.watch_parameters()
        self._is_learning = False
        self._round = self._uncounted  # all of its buckets are to be summed

    def _laid_out(self, learnt: Learnt | None) -> LaidOut:
        return LaidOut(self._replicas, learnt, self._bucket_nbytes, self.between, self._processes, self._comm_dtype)

    def forget_layout(self) -> None:
        """The next backward is looked at as the first one was; values and gradients stay where they are."""
        self.layout, self._ready = self._laid_out(None), []
        self.watch_parameters()
        self._rest()

    def _sum(self, bucket: int) -> None:
        """Over the ranks of each device, then over the devices."""
        with span("all_reduce", ALL_RANKS, None, bucket), self._side.entered() if self._has_streams else NOTHING:
            self.layout.of_buckets.tell(bucket)
            for place in range(len(self.layout.flats)):
                self.layout.of_buckets.add_up_ranks(bucket, place)
            if len(self.layout.flats) > 1 and (self.between.hook is None or self.layout.outbox is None):
                self.layout.of_buckets.add_up_devices(bucket)
            if self.layout.outbox is not None:
                self.layout.outbox.put(bucket)

    def open_outbox(self) -> None:
        """Before an update; a hook takes buckets all the way, in the outbox's order."""
        if self.layout.outbox is not None:
            self.layout.outbox.open(self.layout.of_buckets.add_up_devices if self.between.hook is not None else None)

    def _sum_loose(self, i: int) -> torch.Tensor:
        parts = [row[i].grad for row in self._replicas.parameters]
        return dispatch.reduce_batch([parts], "sum", self._replicas.devices[0])[0]


def _accumulated(sync: weakref.ref[GradientSync], rank: int, i: int) -> None:
    found = sync()
    if found is not None:
        found._accumulated(rank, i)


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
