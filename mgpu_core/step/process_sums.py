"""Sums of gradients over the processes of a ``torch.distributed`` group; each process has ranks of its own.

All processes sum their buckets in one order, that of the buckets' numbers.  A bucket that is ready waits for its turn:
begun as they become ready, the sums of two processes would be of different buckets::

    process 0   bucket 1 is ready ─ bucket 0 is ready: sums 0, 1 ─── bucket 2 is ready: sum 2 ─── weight and mask
    process 1   bucket 0 is ready: sum 0 ─── bucket 1 is ready: sum 1 ─── bucket 2: sum 2 ─────── weight and mask

A sum begins in the thread of the rank that completes the bucket; the caller's thread waits for it at the end.  How many
steps the processes make, and how they end where one fails, is left to the caller and ``torch.distributed``, whose
timeout bounds each wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import distributed
from torch.nn import Module

from mgpu_core.devices.memory import note_written
from mgpu_core.devices.streams import GPU_TYPE
from mgpu_core.devices.tensor_checks import bytes_of
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trees.module_tree import parameters_of

if TYPE_CHECKING:  # a torch built without it has none
    from torch.distributed import ProcessGroup, Work

__all__ = ["ProcessSums", "Weight"]

Weight: TypeAlias = float | torch.Tensor

_SLICE = timedelta(seconds=0.2)  # how long Ctrl-C may have to wait


class ProcessSums:
    """The sums of one process with the others.

    Args:
        group: of ``torch.distributed``; all of its processes make the same calls in the same order.
        device: of messages that are not the caller's own tensors.

    Attributes:
        count: how many processes there are.
        backend: of the group.
        broken: why no further sum can be made; ``None``: it can.

    Raises:
        TypeError, ValueError: not an initialised group, or one that this process does not belong to.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        _check(group)
        self.count = distributed.get_world_size(group)
        self.broken: str | None = None
        self._group, self._is_first = group, distributed.get_rank(group) == 0
        self._first = distributed.get_global_rank(group, 0)
        self.backend = distributed.get_backend(group)
        self._device = torch.device("cpu") if self.backend == "gloo" else device
        self._lock = threading.Lock()
        self._messages: Sequence[torch.Tensor] = ()
        self._dtype: torch.dtype | None = None
        self._begin()

    def _begin(self) -> None:
        self._ready: set[int] = set()
        self._next = 0
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Work | None]] = []

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """Compare facts with those of the other processes.

        Args:
            facts: by topic, values that can be pickled and printed.

        Raises:
            ValueError: in all processes alike, names the first topic and process that differ.
        """
        all_facts: list[Any] = [None] * self.count
        with self._on_device():
            distributed.all_gather_object(all_facts, dict(facts), self._group)
        for process, theirs in enumerate(all_facts):
            for topic in all_facts[0] | theirs:
                wanted, fact = all_facts[0].get(topic, "none"), theirs.get(topic, "none")
                if fact != wanted:
                    raise ValueError(f"processes differ in {topic}: {wanted} in process 0, {fact} in process {process}")

    def from_first(self, value: Any) -> Any:
        """Return the value that process 0 passes."""
        objects = [value]
        with self._on_device():
            distributed.broadcast_object_list(objects, self._first, self._group, self._device)
        return objects[0]

    def send_module(self, module: Module) -> None:
        """Give all processes the parameters and buffers of process 0, of any dtype."""
        tensors = [*parameters_of(module), *module.buffers()]
        single = [_without_repeats(each.detach()) for each in tensors if each.numel()]
        sent = [each.contiguous() for each in single]
        for message in sent:
            self._wait(self._begun(partial(distributed.broadcast, bytes_of(message), self._first), message.device))
        if self._is_first:
            return
        for tensor, message in zip(single, sent, strict=True):
            if not tensor.is_contiguous():  # else the message is the tensor's own memory
                tensor.copy_(message)
        note_written(tensors)

    def use(self, messages: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        """Sum these tensors in place from now on, one per bucket; in transit in ``dtype``, ``None``: their own."""
        self._messages, self._dtype = messages, dtype

    def put(self, bucket: int) -> None:
        """Begin the sum of a bucket as soon as those before it have begun; in any thread."""
        with self._lock:
            self._ready.add(bucket)
            while self._next in self._ready:
                message = self._messages[self._next]
                self._next += 1
                is_cast = self._dtype is not None and not message.is_complex()
                sent = message.to(self._dtype) if is_cast else message
                self._under_way.append((message, sent, self._begun(partial(distributed.all_reduce, sent), sent.device)))

    def has_begun(self, bucket: int) -> bool:
        """Return whether the sum of a bucket has begun."""
        return bucket < self._next

    def finish(self, weight: Weight, used: Sequence[bool]) -> tuple[float, list[bool]]:
        """Wait for the sums of all buckets.

        Args:
            weight: of this process's gradients.
            used: per parameter whether a rank of this process used it.

        Returns:
            The weight of all processes, and per parameter whether any of them used it.
        """
        for message, sent, work in self._under_way:
            self._wait(work)
            if sent is not message:
                message.copy_(sent)
        totals = torch.tensor([float(weight), *map(float, used)], dtype=torch.float64, device=self._device)
        self._wait(self._begun(partial(distributed.all_reduce, totals), totals.device))
        total, *counts = totals.tolist()
        self._begin()
        return total, [count > 0 for count in counts]

    def abandon(self) -> None:
        """Give up the sums that have begun; the other processes may have updated by them."""
        if self._next:
            self.broken = (
                "a step failed in this process when some of its gradients had been summed with those of the others: "
                "start all processes again from the last checkpoint"
            )
        self._begin()

    def _begun(self, collective: Callable[..., Work | None], device: torch.device) -> Work | None:
        """Begin a collective; ``None``: the current stream of the device waits for it, and the host goes on."""
        work = collective(group=self._group, async_op=True)
        if work is None or device.type != GPU_TYPE:
            return work
        work.wait()
        return None

    @staticmethod
    def _wait(work: Work | None) -> None:
        """Wait in slices, so that Ctrl-C comes through."""
        if work is None:
            return
        while not work.is_completed():
            with suppress(RuntimeError):  # a slice has passed; a failure has completed it, and is raised below
                work.wait(_SLICE)
        work.wait()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the own device current: collectives over objects have no other way to know it."""
        return torch.cuda.device(self._device) if self._device.type == GPU_TYPE else NULL_CONTEXT


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in which each element of an expanded tensor stands once."""
    return tensor[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()])]


def _check(group: Any) -> None:
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError("process_group needs torch.distributed.init_process_group() before; torchrun does not call it")
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process does not belong to process_group")
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            "process_group must be a group of torch.distributed, such as torch.distributed.group.WORLD, not "
            f"{type(group).__name__}"
        )
