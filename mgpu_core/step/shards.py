"""Parameters in shards: each device keeps an N-th of each block, and has all of it while one of its ranks runs it.

A rank copies a block from the parts of all devices, which are written between steps alone: no rank waits for another.
What it has whole when, ``held_blocks.py`` says.
"""

from __future__ import annotations

from _thread import get_ident
from collections import Counter, deque
from collections.abc import Container, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Module, Parameter

from mgpu_core.devices import streams
from mgpu_core.devices.absent_memory import cells_of, why_not_absent
from mgpu_core.devices.dtypes import FLOATING
from mgpu_core.devices.streams import own_stream
from mgpu_core.devices.tensor_checks import moved_between
from mgpu_core.optim.bucket_layout import Bucket, bucket_of
from mgpu_core.optim.cut_buffers import CutTensors
from mgpu_core.optim.flat_buffers import shaped
from mgpu_core.ranks.pace import Pace
from mgpu_core.ranks.team import Team
from mgpu_core.step.held_blocks import BlockBuffer, BlocksOfRank, call_block
from mgpu_core.trees.blocks import blocks_of
from mgpu_core.trees.module_tree import ModuleTree, named_parameters_of

__all__ = ["Shards"]

_version_of, _set_data = attrgetter("_version"), torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CALL = "_compiled_call_impl"  # what a module's call runs in place of its hooks and forward, if it is there


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
        self._ranks = [BlocksOfRank(device) for device in team.devices]
        for unit in range(len(blocks)):
            mine = [
                (flats, number)
                for flats, layout in ((self.flats, trained), (self.frozen, frozen))
                for number, (of_unit, _) in enumerate(layout)
                if of_unit == unit
            ]
            buffers = {device: BlockBuffer(self._devices, device, mine) for device in self._devices}
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
                block.__dict__[_CALL] = partial(call_block, of_rank, unit, call or block._call_impl)
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
