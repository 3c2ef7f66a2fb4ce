r"""Which blocks a rank has whole, and when it lets go of them.

It has one block at a time, on a GPU the next one too, and all the time the root: the layers outside of blocks::

    forward    fill b0 | b0 | fill b1 | b1 | ...                         each is freed when its call returns
    backward   fill b1 | backward of b1 | fill b0 | backward of b0 | ...  each is freed when the next one begins

A block's backward begins with the gradient of one of its outputs.  Autograd takes the node that was made last among
those that are ready, so when the backward of another block begins, all nodes of the one before are through.  A forward
inside a backward (both kinds of checkpoints) keeps its block until another one is called or begins.  If one were freed
too early nevertheless, reading it would be an error that names it, and never another number.

On a GPU the next block is filled on the copies' side stream while this one computes, in the order of the call before::

    compute    [ block 0 ──────────] wait [ block 1 ──────────] wait ...
    copies     wait [ fill 1 ]            wait [ fill 2 ]
                 └ for the work before block 0: the memory was another block's then

Memory is allocated and freed on the compute stream, which waits for the copies, so it needs no record of streams.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch._C._functorch import peek_interpreter_stack

from mgpu_core.comm import dispatch
from mgpu_core.devices import streams
from mgpu_core.devices.absent_memory import drop_memory, hide, restore_memory, show
from mgpu_core.devices.streams import own_stream
from mgpu_core.devices.transfer import copied_so_far, copying_to
from mgpu_core.optim.cut_buffers import CutTensors
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.nested import tensors_in

__all__ = ["BlockBuffer", "BlocksOfRank", "call_block"]

_in_backward = torch._C._current_graph_task_id


class BlockBuffer:
    """The whole buckets of a unit on one device.

    Args:
        devices: that keep parts.
        device: one of them.
        buckets: the memory of all devices, and the number of a bucket in it.
    """

    def __init__(
        self, devices: Sequence[torch.device], device: torch.device, buckets: Sequence[tuple[list[CutTensors], int]]
    ) -> None:
        self._devices, self._device, self._is_gpu = devices, device, device.type == streams.GPU_TYPE
        of_devices = [(flats[devices.index(device)], flats, number) for flats, number in buckets]
        self._wholes = [(flat.values[number], flat.texts[number]) for flat, _, number in of_devices]
        self._parts = [[flat.value_parts[number] for flat in flats] for _, flats, number in of_devices]
        self._holders: set[int] = set()
        self._copied: torch.Event | None = None
        self._lock = threading.Lock()

    def hold(self, holder: int, *, ahead: bool) -> None:
        """Fill the buckets, unless another rank has, and keep them for this one.

        The current stream waits for the copies; ``ahead`` of their use it does not.
        """
        with self._lock:
            if not self._holders:
                with NULL_CONTEXT if tracer.sink is None else span("fill", device=self._device):
                    self._fill()
            self._holders.add(holder)
            for whole in self._wholes if self._is_gpu else ():
                hide(*whole) if ahead and len(self._holders) == 1 else show(whole[0])
        if self._copied is not None and not ahead:
            self._wait(self._copied)

    def let_go(self, holder: int) -> None:
        """Free the buckets, if no other rank of the device keeps them."""
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                if self._copied is not None:
                    self._wait(self._copied)
                self._free()

    def _wait(self, copied: torch.Event) -> None:
        torch.accelerator.current_stream(self._device).wait_event(copied)

    def _fill(self) -> None:
        try:
            for absent in self._wholes:
                restore_memory(*absent)
            if self._is_gpu:
                own_stream("copies", self._device.index).wait_stream(torch.accelerator.current_stream(self._device))
            with copying_to(self._devices) if self._is_gpu else NULL_CONTEXT:
                for parts, (whole, _) in zip(self._parts, self._wholes, strict=True):
                    dispatch.gather_into(parts, whole, 0)
            self._copied = copied_so_far(self._device) if self._is_gpu else None
        except BaseException:
            self._free()
            raise

    def _free(self) -> None:
        for whole in self._wholes:
            drop_memory(*whole)


class BlocksOfRank:
    """The units that a rank needs; in its worker, then in the thread of its backward.

    Args:
        device: of the rank.

    Attributes:
        buffers: of the device, by unit.
        thread: in which the rank's forward runs, or has run; ``None``: it has not run yet.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffers: list[BlockBuffer] = []
        self.thread: int | None = None
        self._looks_ahead = device.type == streams.GPU_TYPE
        self._orders: dict[bool, list[int]] = {}  # in which units were needed last: with a backward, and without
        self.begin(False)

    def begin(self, is_training: bool) -> None:
        """Begin a pass; nothing is held."""
        self._held: set[int] = set()
        self._ready: set[int] = set()  # of these, for which the stream that computes has waited
        self._calls: list[int] = []  # whose forward runs
        self._begun: int | None = None  # whose backward runs
        self._called: int | None = None  # which was called last inside a backward
        self._ahead: int | None = None  # which is filled ahead
        self._kept: set[int] = set()  # until the pass ends
        self._planned = self._orders.get(is_training, [])
        self._seen = self._orders[is_training] = list[int]()

    def keep(self, unit: int) -> None:
        """Hold a unit until the pass ends."""
        self._kept.add(unit)
        self._settle()

    def enter(self, unit: int) -> bool:
        """Begin a call of a block; return whether it is inside a backward."""
        inside = _in_backward() != -1
        if inside:
            self._called = unit
        else:
            self._calls.append(unit)
            self._begun = self._called = None
        self._need(unit)
        return inside

    def leave(self) -> None:
        """End a call outside of a backward."""
        self._calls.pop()
        self._settle()

    def begin_backward(self, unit: int, _: torch.Tensor) -> None:
        """Begin the backward of a call; a hook on each of its outputs.

        A graph of the backward reads the parameters once more: with ``create_graph=True`` the block stays.
        """
        if torch.is_grad_enabled():
            self._kept.add(unit)
        if unit != self._begun or self._called not in (None, unit):
            self._begun, self._called = unit, None
            self._need(unit)

    def _need(self, unit: int) -> None:
        """Hold this unit, and on a GPU the one that was needed after it in the pass before."""
        at = len(self._seen)
        self._seen.append(unit)
        self._ahead = None
        if self._looks_ahead and self._planned[at : at + 1] == [unit] and at + 1 < len(self._planned):
            self._ahead = self._planned[at + 1]
        self._settle()

    def _settle(self) -> None:
        """Hold the units that are needed, and no other."""
        now = self._begun, self._called
        wanted, ahead = {*self._calls, *self._kept, *[unit for unit in now if unit is not None]}, self._ahead
        for unit in self._held - wanted - {ahead}:
            self.buffers[unit].let_go(id(self))
        self._held &= {*wanted, ahead}
        self._ready &= wanted
        for unit in wanted - self._ready:
            self._held.add(unit)  # before: one that Ctrl-C interrupts is let go of, too
            self.buffers[unit].hold(id(self), ahead=False)
            self._ready.add(unit)
        if ahead is not None and ahead not in self._held:
            self._held.add(ahead)
            self.buffers[ahead].hold(id(self), ahead=True)

    def rest(self) -> None:
        """Let go of all blocks that are not kept until the pass ends; of one whose call has failed, too."""
        self._calls.clear()
        self._begun = self._called = self._ahead = None
        self._settle()

    def end(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self.rest()


def call_block(of_rank: BlocksOfRank, unit: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block, which has memory meanwhile, and again in its backward."""
    if peek_interpreter_stack() is not None:
        raise RuntimeError("a block inside a transform of torch.func cannot have its parameters in shards: shard=None")
    if of_rank.thread not in (None, get_ident()) and _in_backward() == -1:
        raise RuntimeError(
            "a block of a rank is called in a thread of another one (by a loss that calls the net itself, say), which "
            'shard="parameters" cannot have: use workers="caller"'
        )
    inside, first = of_rank.enter(unit), _get_sequence_nr()
    try:
        output = call(*args, **kwargs)
    finally:
        if not inside:
            of_rank.leave()
    if torch.is_grad_enabled():
        begin = partial(of_rank.begin_backward, unit)
        for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= first:  # made by this call, and not passed through it
                tensor.register_hook(begin)
    return output
