"""Where to cut a module's layers, so that the slowest or the largest part is as small as it can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from mgpu_core.devices.devices import accelerators
from mgpu_core.pipeline.deferred import recomputing
from mgpu_core.pipeline.layers import bytes_of, checked_shares, largest_block, layers_of, least_cut
from mgpu_core.ranks.random import random_numbers_kept
from mgpu_core.support.tables import Table
from mgpu_core.trees.filled import FilledContents
from mgpu_core.trees.nested import map_leaves, tensors_in, unwrapped

__all__ = [
    "Balance",
    "BalanceTable",
    "Part",
    "SavedTensors",
    "arguments_of",
    "balance",
    "cut_layers",
    "measured_layers",
]

_REPEATS = 3


class Part(NamedTuple):
    """The layers of one part.

    Attributes:
        layers: their names, in the order of the calls.
        seconds: of their forwards and backwards on the sample.
        nbytes: of their parameters and buffers, and of what autograd keeps for the backward.
    """

    layers: tuple[str, ...]
    seconds: float
    nbytes: int


class BalanceTable:
    """The parts of a cut; ``print`` shows the slowest or largest one, and what the cuts next to this one would cost.

    Attributes:
        parts: one :class:`Part` each.
        by: ``time`` or ``memory``.
        moves: ``(layer, part, cost)`` per layer at a border: the most that a part would cost with it in that other
            part, in seconds or bytes.
    """

    def __init__(self, layers: Sequence[Part], cut: Sequence[int], by: str) -> None:
        self.by = by
        borders = [0, *cut, len(layers)]
        self.parts = [_joined(layers[begin:end]) for begin, end in pairwise(borders)]
        self.moves: list[tuple[str, int, float]] = []
        for part, index in enumerate(cut):
            for moved, target in ((index + 1, part), (index - 1, part + 1)):
                others = [*borders[: part + 1], moved, *borders[part + 2 :]]
                if others == sorted(set(others)):  # no part is empty
                    sums = [_joined(layers[i:j]) for i, j in pairwise(others)]
                    layer = layers[min(index, moved)].layers[0]
                    self.moves.append((layer, target, max(map(self._cost, sums))))

    @property
    def worst(self) -> int:
        """The index of the slowest part, or of the largest."""
        return max(range(len(self.parts)), key=lambda index: self._cost(self.parts[index]))

    def _cost(self, part: Part) -> float:
        return part.seconds if self.by == "time" else part.nbytes

    def _text(self, cost: float) -> str:
        return f"{cost * 1e3:.3g} ms" if self.by == "time" else f"{cost / 2**20:.4g} MiB"

    def __repr__(self) -> str:
        costs, name = list(map(self._cost, self.parts)), "slowest" if self.by == "time" else "largest"
        return f"<{len(costs)} parts, the {name} {max(costs) * len(costs) / sum(costs):.2f} of their mean>"

    def __str__(self) -> str:
        rows = [("part", "forward + backward", "memory", "layers")]
        for index, (layers, seconds, nbytes) in enumerate(self.parts):
            names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
            mark = "*" if index == self.worst else ""
            rows += ((f"{index}{mark}", f"{seconds * 1e3:.3g} ms", f"{nbytes / 2**20:.4g} MiB", names),)
        lines = [str(Table(rows, words=(0, 3)))]
        costs = list(map(self._cost, self.parts))
        fair = sum(costs) / len(costs)
        lines.append(f"*: {self._text(max(costs))}; equal parts would take {self._text(fair)} each")
        lines += [f"   with {layer} in part {part}: {self._text(cost)}" for layer, part, cost in self.moves]
        return "\n".join(lines)


class Balance(NamedTuple):
    """Where to cut a module.

    Attributes:
        split: the names of the layers at which the parts after the first begin, for ``split`` of
            :func:`mgpu_core.place` and ``split_points`` of :class:`mgpu_core.Pipeline`.
        table: the cost of each part.
    """

    split: list[str]
    table: BalanceTable


def balance(
    net: Module,
    sample: Any,
    parts: int,
    by: str = "time",
    *,
    shares: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
) -> Balance:
    """Find the cut whose slowest part is the fastest, or whose largest part is the smallest.

    Runs the net once on ``sample``, and each of its layers a few times more, forward and backward, on the devices where
    they are.  The layers are those that :func:`mgpu_core.place` places, in the order of their calls.  Code between them
    is not counted.  Buffers, gradients and random numbers stay as they were.

    Args:
        net: a module whose layers run one after the other.
        sample: the arguments of a call: a tuple; a dict by name; or the only argument.
        parts: how many.
        by: ``time``; or ``memory``, the bytes of parameters, buffers and of what autograd keeps for the backward.
        shares: one positive number per part: of unequal devices, how much each can take.
        memory: the bytes that each part may have, of parameters, buffers and what autograd keeps.

    Returns:
        The cut, and a table of its parts to print.

    Raises:
        ValueError: another ``by``; more parts than layers that the net calls; no cut keeps to ``memory``.
    """
    if by not in ("time", "memory"):
        raise ValueError(f"by must be time or memory, not {by!r}")
    return cut_layers(measured_layers(net, sample, parts), parts, by, shares=shares, memory=memory)


def measured_layers(net: Module, sample: Any, parts: int) -> list[Part]:
    """Return the layers of a net in the order of their calls, each as a part of its own; see :func:`balance`."""
    given = FilledContents(sample, of_objects=True)
    with recomputing([net]), random_numbers_kept(each.device for each in net.parameters()):
        try:
            return [_measured(name, unit, *call) for name, unit, call in _calls(net, sample, parts)]
        finally:
            given.put_back()


def cut_layers(
    layers: Sequence[Part],
    parts: int,
    by: str,
    *,
    shares: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
) -> Balance:
    """Return the best cut of measured layers; see :func:`balance`."""
    nbytes = [each.nbytes for each in layers]
    costs: Sequence[float] = [each.seconds for each in layers] if by == "time" else nbytes
    cut = least_cut(costs, checked_shares(shares, parts), nbytes, memory)
    return Balance([layers[index].layers[0] for index in cut], BalanceTable(layers, cut, by))


def arguments_of(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a sample."""
    if isinstance(sample, dict):
        return (), unwrapped(sample)
    return unwrapped(sample if isinstance(sample, tuple) else (sample,)), {}


def _calls(net: Module, sample: Any, parts: int) -> list[tuple[str, Module, tuple[Any, Any, FilledContents]]]:
    """Run the net once; return the layers in the order of their first calls, with the arguments of those.

    A cache comes with its contents of then.
    """
    names = {unit: name for name, unit in layers_of(net, largest=largest_block(net, parts))}
    calls: dict[Module, tuple[Any, Any, FilledContents]] = {}

    def before(unit: Module, args: Any, kwargs: Any) -> None:
        if unit not in calls:
            calls[unit] = args, kwargs, FilledContents((args, kwargs), of_objects=True)

    hooks = [unit.register_forward_pre_hook(before, with_kwargs=True) for unit in names]
    args, kwargs = arguments_of(sample)
    try:
        with torch.no_grad():
            net(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return [(names[unit], unit, call) for unit, call in calls.items()]


def _measured(name: str, unit: Module, args: Any, kwargs: Any, given: FilledContents) -> Part:
    """Return the cost of one layer: the least time of a few, after one to warm up."""
    timed = []
    for _ in range(1 + _REPEATS):
        given.put_back()
        timed.append(_timed(unit, args, kwargs))
    return Part((name,), min(seconds for seconds, _ in timed[1:]), bytes_of(unit) + timed[0][1])


def _timed(unit: Module, args: Any, kwargs: Any) -> tuple[float, int]:
    """Return the seconds of a forward and a backward, and the bytes that autograd keeps between them."""
    parameters = [each for each in unit.parameters() if each.requires_grad]
    leaves: list[torch.Tensor] = []

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        leaves.append(leaf.detach().requires_grad_())
        return leaves[-1].clone()  # that the layer may write in place

    args, kwargs = map_leaves((args, kwargs), fresh)
    _synchronize()
    begin = perf_counter()
    saved = SavedTensors(parameters)
    with torch.enable_grad(), saved:
        outputs = [each for each in tensors_in(unit(*args, **kwargs)) if each.requires_grad]
        if outputs:
            ones = [torch.ones_like(each) for each in outputs]
            torch.autograd.grad(outputs, [*leaves, *parameters], ones, allow_unused=True)
    _synchronize()
    return perf_counter() - begin, saved.nbytes


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes of memory that autograd keeps of what is computed inside, each once.

    Args:
        known: tensors whose memory does not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        known_memory = set(map(_identity, known))
        self._kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is torch.strided and _identity(tensor) not in known_memory:
                self._kept.setdefault(_identity(tensor), tensor.untyped_storage())
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that were saved so far."""
        return sum(each.nbytes() for each in self._kept.values())


def _identity(tensor: torch.Tensor) -> int:
    """Return a number that all views of one memory have in common."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -1


def _synchronize() -> None:
    for device in accelerators():
        torch.accelerator.synchronize(device)


def _joined(layers: Sequence[Part]) -> Part:
    names, seconds, nbytes = zip(*layers, strict=True)
    return Part(sum(names, ()), sum(seconds), sum(nbytes))
