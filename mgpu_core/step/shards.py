r"""Parameters in shards: each device keeps an N-th of each block, and has all of it while one of its ranks runs it.

A rank copies a block from the parts of all devices, which are written between steps alone: no rank waits for another.
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
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Module, Parameter

from mgpu_core.comm import dispatch
from mgpu_core.devices import streams
from mgpu_core.devices.absent_memory import cells_of, drop_memory, hide, restore_memory, show, why_not_absent
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.streams import own_stream
from mgpu_core.devices.tensor_checks import moved_between
from mgpu_core.devices.transfer import copied_so_far, copying_to
from mgpu_core.optim.bucket_layout import Bucket, bucket_of
from mgpu_core.optim.cut_buffers import CutTensors
from mgpu_core.optim.flat_buffers import shaped
from mgpu_core.ranks.pace import Pace
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.blocks import blocks_of
from mgpu_core.trees.module_tree import ModuleTree, named_parameters_of
from mgpu_core.trees.nested import tensors_in

__all__ = ["Shards"]

_version_of, _set_data = attrgetter("_version"), torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CALL = "_compiled_call_impl"  # what a module's call runs in place of its hooks and forward, if it is there
_in_backward = torch._C._current_graph_task_id


class Shards:
    """The parameters of a module in shards, and who has them whole.

    Args:
        tree: the module.
        team: the ranks.
        limit_nbytes: blocks are joined as long as they are smaller together.

    Attributes:
        buckets: of parameters that require grad: one per block, or several joined, and dtype.
        flats: per device the memory of these.
        frozen: per device the memory of the others.
        cut: the parameters in shards; others, whose dtype no kernel updates, are whole on each device.
        leaves: the parameters of all ranks, in rows; the first has the user's.
        pace: of the ranks in their backwards.
        unset: parameters that came without memory, and have no values yet.
        absent: by parameter the tensor without memory that the user's is a view of between steps.

    Raises:
        ValueError: devices or a module that cannot do this.
    """

    def __init__(self, tree: ModuleTree, team: Team, limit_nbytes: int) -> None:
        self._devices = list(dict.fromkeys(team.devices))
        if reason := why_not_absent(self._devices):
            raise ValueError(f'shard="parameters" cannot be here: {reason}')
        self.leaves: Sequence[Parameter] = tree.parameters
        self.cut = {i for i, param in enumerate(tree.parameters) if param.dtype in FLOATING}
        members, blocks = _units_of(tree, self.cut, limit_nbytes)
        self._blocks = [(block, unit) for unit, of in enumerate(blocks) for block in of.values()]
        self._root = len(blocks) - 1
        trained, frozen = (
            _buckets_of(tree.parameters, members, len(self._devices), requires_grad) for requires_grad in (True, False)
        )
        texts = [_text_of([*of]) for of in blocks]
        self.buckets = tuple(bucket for _, bucket in trained)
        self.flats, self.frozen = (self._memory_of(layout, texts) for layout in (trained, frozen))
        self._flats_of = {i: flats for flats in (self.flats, self.frozen) for i in flats[0].value_views}
        self._ranks = [_BlocksOfRank(device) for device in team.devices]
        for unit in range(len(blocks)):
            mine = [
                (flats, number)
                for flats, layout in ((self.flats, trained), (self.frozen, frozen))
                for number, (of_unit, _) in enumerate(layout)
                if of_unit == unit
            ]
            buffers = {device: _Buffer(self._devices, device, mine) for device in self._devices}
            for of_rank, device in zip(self._ranks, team.devices, strict=True):
                of_rank.buffers.append(buffers[device])
        self._stand_ins: list[tuple[Module, Any]] = []
        self._is_shown = False  # the user's parameters are views of memory that is there at times
        self.absent = {i: view for flats in (self.flats, self.frozen) for i, view in flats[0].stand_ins().items()}
        self._own = [tree.parameters[i] for i in self.absent]
        self._there = [self.view(i, self._devices[0]) for i in self.absent]
        self._cells = cells_of(self._there)
        self._versions, self.pace, self.unset = list[int](), Pace(0), set[int]()
        self._names = [name for name, _ in named_parameters_of(tree.nodes[0].module)]

    def _memory_of(self, layout: Sequence[tuple[int, Bucket]], texts: Sequence[str]) -> list[CutTensors]:
        count = len(self._devices)
        buckets, texts = [bucket for _, bucket in layout], [texts[unit] for unit, _ in layout]
        return [CutTensors(buckets, self.leaves, at, index, count, texts) for index, at in enumerate(self._devices)]

    def put(self, i: int, value: torch.Tensor) -> None:
        """Give a parameter another value, which lies on any device."""
        for flat in self._flats_of[i]:
            flat.put(i, value)
        self.unset.discard(i)

    def view(self, i: int, device: torch.device) -> torch.Tensor:
        """Return a device's view of a parameter, which has memory at times."""
        return self._flats_of[i][self._devices.index(device)].value_views[i]

    def whole(self, i: int, device: torch.device) -> torch.Tensor:
        """Return a copy of a parameter on any device."""
        like = self.view(i, self._devices[0])
        flat = torch.empty(like.numel(), dtype=like.dtype, device=device)
        for of_device in self._flats_of[i]:
            of_device.bring(i, flat)
        return shaped(flat, 0, like)

    def begin(
        self, tree: ModuleTree, modules: Sequence[Sequence[Module]], *, is_training: bool, go_together: bool
    ) -> None:
        """Let modules run; the root's parameters get memory.

        Args:
            tree: the module as it is now.
            modules: per rank those of the tree's nodes.
            is_training: a backward follows.
            go_together: ranks that are ahead wait for the others, before their gradients pile up.
        """
        if self.unset:
            raise RuntimeError(
                f"parameter {self._names[min(self.unset)]} came without memory, and has no values yet: call "
                "step.load_weights(folder) or step.load_state_dict(state)"
            )
        self.end()
        self.pace = Pace(len(modules) if go_together and not self.pace.was_in_vain else 0)
        self._is_shown = True
        deque(map(_set_data, self._own, self._there), maxlen=0)
        self._versions = list(map(_version_of, self.leaves))
        self._settle_copies()
        for rank, nodes in enumerate(modules):
            of_rank = self._ranks[rank]
            of_rank.begin(is_training)
            for original, unit in self._blocks:
                if id(original) not in tree.indices:  # the module has lost it
                    continue
                block = nodes[tree.indices[id(original)]]
                call = block.__dict__.get(_CALL)
                self._stand_ins.append((block, call))
                block.__dict__[_CALL] = partial(_call, of_rank, unit, call or block._call_impl)
        for rank in range(len(modules)):
            self._ranks[rank].keep(self._root)

    def at_work(self, rank: int) -> None:
        """Note that a rank begins, in this thread."""
        self._ranks[rank].thread = get_ident()

    def rest(self, rank: int) -> None:
        """Let go of the blocks of a rank that is through, but not of the root's."""
        self.pace.end(rank)
        self._ranks[rank].rest()

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a call has written a parameter in place: it would be lost with the block's memory."""
        now = list(map(_version_of, self.leaves))
        if now != self._versions:
            i = next(i for i, (one, other) in enumerate(zip(now, self._versions, strict=True)) if one != other)
            raise RuntimeError(
                f"the forward writes parameter {self._names[i % len(self._names)]} in place (a moving average, "
                'Embedding(max_norm=...)?), which shard="parameters" cannot keep: write it between steps, inside '
                "step.full_parameters()"
            )

    def end(self) -> None:
        """Free all whole buckets, when no rank is at work any more."""
        for block, call in self._stand_ins:
            block.__dict__.pop(_CALL, None)
            if call is not None:
                block.__dict__[_CALL] = call
        self._stand_ins.clear()
        for of_rank in self._ranks:
            of_rank.end()
        self._settle_copies()
        if self._is_shown:
            assigned = moved_between(cells_of(self._own), self._cells)  # `.data =` in a forward
            for at, (parameter, absent) in enumerate(zip(self._own, self.absent.values(), strict=True)):
                if at not in assigned:
                    parameter.data = absent
            self._is_shown = False  # last: Ctrl-C may have come in between, and the end comes again

    def _settle_copies(self) -> None:
        """Order the copies after all work of the devices so far, and the other way round."""
        for device in self._devices:
            if device.type == streams.GPU_TYPE:
                copies, current = own_stream("copies", device.index), torch.accelerator.current_stream(device)
                copies.wait_stream(current)
                current.wait_stream(copies)


class _Buffer:
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
        """Fill it, unless somebody holds it; the current stream waits for that, unless it is ``ahead`` of its use."""
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
        """Free it, if nobody else holds it."""
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


class _BlocksOfRank:
    """The units that a rank needs; in its worker, then in the thread of its backward.

    Args:
        device: of the rank.

    Attributes:
        buffers: of the device, by unit.
        thread: in which the rank's forward runs, or has run; ``None``: it has not run yet.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffers: list[_Buffer] = []
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


def _call(of_rank: _BlocksOfRank, unit: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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


def _units_of(
    tree: ModuleTree, cut: Container[int], limit_nbytes: int
) -> tuple[list[list[int]], list[dict[str, Module]]]:
    """Return the parameters of each unit, and its blocks by their names; the last is the root's, without blocks.

    A parameter belongs to the block that alone has it; blocks are joined up to ``limit_nbytes``.

    Raises:
        ValueError: a compiled module around blocks: their calls would be part of its code.
    """
    blocks = blocks_of(tree.nodes[0].module)
    numbers = {id(param): i for i, param in enumerate(tree.parameters)}
    below = {name: {id(module) for module in block.modules()} for name, block in blocks.items()}
    inside = {name: [numbers[id(param)] for param in Module.parameters(block)] for name, block in blocks.items()}
    others = [node for node in tree.nodes if not any(id(node.module) in modules for modules in below.values())]
    for node in others:
        around = [name for name, block in blocks.items() if any(block is module for module in node.module.modules())]
        if node.compiled is not None and around:
            raise ValueError(
                f'shard="parameters" cannot have {type(node.module).__name__} compiled around {around[0]}: compile '
                "the blocks (block.compile())"
            )
    uses = Counter(i for indices in inside.values() for i in indices)
    uses.update(i for node in others for _, i in node.parameters)
    members, units, nbytes = list[list[int]](), list[dict[str, Module]](), limit_nbytes
    for name, indices in inside.items():
        mine = [i for i in indices if uses[i] == 1 and i in cut]
        more = sum(tree.parameters[i].nbytes for i in mine)
        if mine and nbytes + more > limit_nbytes:
            members.append([])
            units.append({})
            nbytes = 0
        if mine:
            nbytes += more
            members[-1] += mine
            units[-1][name] = blocks[name]
    taken = {i for indices in members for i in indices}
    root = [i for i in range(len(tree.parameters)) if i in cut and i not in taken]
    return [*members, root], [*units, {}]


def _buckets_of(
    parameters: Sequence[Parameter], members: Sequence[Sequence[int]], count: int, requires_grad: bool
) -> list[tuple[int, Bucket]]:
    """Return the buckets of the parameters that require grad, or of the others: one per unit and dtype."""
    counts, sizes = [param.numel() for param in parameters], [param.element_size() for param in parameters]
    buckets = []
    for unit, indices in enumerate(members):
        groups: dict[torch.dtype, list[int]] = {}
        for i in indices:
            if parameters[i].requires_grad == requires_grad:
                groups.setdefault(parameters[i].dtype, []).append(i)
        buckets += [(unit, bucket_of(group, counts, sizes, count)) for group in groups.values()]
    return buckets


def _text_of(names: Sequence[str]) -> str:
    """Return the error of a parameter without memory, by the names of the blocks of its unit."""
    owner = " to ".join(dict.fromkeys([*names[:1], *names[-1:]])) or "layers outside of the blocks"
    return (
        f'the parameters of {owner} have no memory now (shard="parameters").  Between steps read and write them inside '
        '"with step.full_parameters():"; in a step they are there while their block is called, block(x), and in its '
        "backward"
    )
