"""The layers of a module, each of which a placement moves in one piece, and the cut between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf

from torch.nn import Module, ModuleDict, ModuleList, Sequential

__all__ = [
    "Layers",
    "bytes_of",
    "checked_shares",
    "cut_by_bytes",
    "in_order",
    "layers_of",
    "largest_block",
    "least_cut",
    "writes_its_input",
]

Layers = Sequence[tuple[str, Module]]
"""Layers with their names."""

_LISTS = (Sequential, ModuleList, ModuleDict)
_BLOCKS_PER_PART = 4  # a module with a list of layers is opened if it is larger than this part of a fair share


def bytes_of(module: Module) -> int:
    """Return the bytes of parameters and buffers."""
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def largest_block(root: Module, parts: int) -> float:
    """Return the bytes above which a module that holds a list of layers is opened, for a cut into so many parts."""
    return bytes_of(root) / parts / _BLOCKS_PER_PART


def layers_of(root: Module, names: Collection[str] = (), largest: float = inf) -> Layers:
    """Return the layers of a module in the order of registration, each once, under its first name.

    The root is opened, and below it lists of modules.  A class that the module's ``_no_split_modules`` names, as the
    models of transformers do, is a layer.

    Args:
        root: the module.
        names: of modules that are layers or lie in none: the modules around them are opened.
        largest: a module that holds a list of layers is opened if it has more bytes than this; where no module holds
            one, as in some of timm, each that has more than a fair share.
    """
    around = {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
    whole = {name for each in root.modules() for name in getattr(each, "_no_split_modules", None) or ()}
    has_lists = any(isinstance(each, _LISTS) for each in root.modules())

    def is_opened(path: str, module: Module) -> bool:
        if path in around:
            return True
        if not module._modules or path in names or type(module).__name__ in whole:
            return False
        if largest == inf or isinstance(module, ModuleList | ModuleDict):
            return isinstance(module, _LISTS)
        if not has_lists:
            return bytes_of(module) > largest * _BLOCKS_PER_PART
        return bytes_of(module) > largest and any(isinstance(each, _LISTS) for each in module.modules())

    def below(module: Module, prefix: str) -> Iterator[tuple[str, Module]]:
        for name, child in module.named_children():
            path = prefix + name
            yield from below(child, f"{path}.") if is_opened(path, child) else [(path, child)]

    layers: dict[int, tuple[str, Module]] = {}
    for name, layer in below(root, ""):
        layers.setdefault(id(layer), (name, layer))
    return list(layers.values())


def writes_its_input(layer: Module) -> bool:
    """Return whether a layer says that it writes its input in place."""
    return getattr(layer, "inplace", False) is True


def in_order(layers: Layers, called: Iterable[str]) -> Layers:
    """Return the layers in the order of these names; one that is not among them comes after the one before it."""
    position = {name: index for index, name in enumerate(called)}
    keys: list[tuple[int, int]] = []
    last = -1
    for index, (name, _) in enumerate(layers):
        last = position.get(name, last)
        keys.append((last, 0 if name in position else index + 1))
    return [layers[index] for index in sorted(range(len(layers)), key=keys.__getitem__)]


def checked_shares(shares: Sequence[float] | None, parts: int) -> Sequence[float]:
    """Return the shares of the parts: equal ones for ``None``.

    Raises:
        ValueError: they are not one positive number per part.
    """
    if shares is None:
        return [1.0] * parts
    if len(shares) != parts or min(shares) <= 0:
        raise ValueError(f"shares must be {parts} positive numbers, one per device, not {list(shares)}")
    return shares


def cut_by_bytes(layers: Layers, shares: Sequence[float], limits: Sequence[float] | None) -> list[str]:
    """Return the names of the layers at which parts after the first begin; see :func:`least_cut`.

    A tensor that several layers have counts for the first of them, where it will be.
    """
    seen: set[int] = set()
    costs = []
    for _, layer in layers:
        tensors = {id(each): each for each in (*layer.parameters(), *layer.buffers()) if id(each) not in seen}
        seen |= tensors.keys()
        costs.append(sum(each.nbytes for each in tensors.values()))
    barred = [index for index, (_, layer) in enumerate(layers) if writes_its_input(layer)]
    return [layers[index][0] for index in least_cut(costs, shares, costs, limits, barred)]


def least_cut(
    costs: Sequence[float],
    shares: Sequence[float],
    nbytes: Sequence[float] = (),
    limits: Sequence[float] | None = None,
    barred: Collection[int] = (),
) -> list[int]:
    """Return where parts after the first begin, so that the largest cost of a part, by its share, is least.

    Dynamic programming over the positions of the last cut; no part is empty.

    Args:
        costs: of the layers.
        shares: one positive number per part.
        nbytes: of the layers.
        limits: the bytes that each part may have; ``None``: any.
        barred: layers that no part begins with.

    Raises:
        ValueError: more parts than layers; no cut keeps to the limits.
    """
    parts, count = len(shares), len(costs)
    are_numbers = isinstance(limits, Sequence) and all(isinstance(each, int | float) for each in limits)
    if limits is not None and not (are_numbers and len(limits) == parts):
        raise ValueError(f"memory must be {parts} numbers of bytes, one per device, not {limits}")
    if not 1 <= parts <= count:
        raise ValueError(f"{parts} parts are more than the {count} layers of the module, or fewer than one")
    sums = [0.0, *accumulate(costs)]
    sizes = [0.0, *accumulate(nbytes)] if limits is not None else []

    def cost(part: int, begin: int, end: int) -> float:
        if limits is not None and sizes[end] - sizes[begin] > limits[part]:
            return inf
        return (sums[end] - sums[begin]) / shares[part]

    # best[end]: the largest cost with the first `end` layers in as many parts as there are so far, and their cuts
    best: dict[int, tuple[float, list[int]]] = {end: (cost(0, 0, end), []) for end in range(1, count + 1)}
    for part in range(1, parts):
        best = {
            end: min(
                (
                    (max(best[cut][0], cost(part, cut, end)), [*best[cut][1], cut])
                    for cut in range(part, end)
                    if cut not in barred
                ),
                default=(inf, []),
            )
            for end in range(part + 1, count + 1)
        }
    least, cuts = best[count]
    if least < inf:
        return cuts
    if barred:
        return least_cut(costs, shares, nbytes, limits)
    raise ValueError(
        f"no cut into {parts} parts keeps to memory={list(limits or ())}: the {count} layers have {sum(nbytes):.0f} "
        f"bytes, and the largest {max(nbytes):.0f}"
    )
