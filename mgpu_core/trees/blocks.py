"""The blocks of a module: its repeated layers, each of which runs as a whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch.nn import Module, ModuleList, Sequential

from mgpu_core.trees.module_tree import modules_of

__all__ = ["blocks_of"]


def blocks_of(net: Module) -> dict[str, Module]:
    """Return the blocks by their names, none inside another, in the order of the module.

    They are the layers that ``_no_split_modules`` of transformers names.  Elsewhere they are the members of a
    ModuleList or Sequential of which several have parameters, the outermost first; one that has more than half of its
    list's parameters, such as the body next to a head, is looked into, and so is a container without a forward.  A
    ScriptModule is no block.
    """
    listed: set[str] = set()
    for module in modules_of(net):
        listed |= set(getattr(module, "_no_split_modules", None) or ())
    names: dict[int, str] = {}
    for name, module in net.named_modules():
        names.setdefault(id(module), name)
    blocks = {names[id(module)]: module for module in _found_in(net, listed)}
    return {name: module for name, module in blocks.items() if not isinstance(module, torch.jit.ScriptModule)}


def _found_in(module: Module, listed: Collection[str]) -> Iterator[Module]:
    """Yield the blocks in a module that is none itself."""
    members: list[Module] = []
    if isinstance(module, ModuleList | Sequential):
        members = [child for child in _children(module) if _count(child)]
    if len(members) < 2 or any(_is_listed(each, listed) for member in members for each in modules_of(member)):
        for child in _children(module):
            if _is_listed(child, listed):
                yield child
            else:
                yield from _found_in(child, listed)
        return
    most = sum(map(_count, members)) / 2
    for member in members:
        is_called = type(member).forward is not Module.forward
        inner = list(_found_in(member, listed)) if _count(member) > most or not is_called else []
        if is_called and len(inner) < 2:
            inner = [member]
        yield from inner


def _children(module: Module) -> Iterable[Module]:
    return (child for child in module._modules.values() if child is not None)


def _is_listed(module: Module, listed: Collection[str]) -> bool:
    return type(module).__name__ in listed and _count(module) > 0


def _count(module: Module) -> int:
    return sum(parameter.numel() for parameter in Module.parameters(module))
