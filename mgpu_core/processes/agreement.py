"""Settings that processes must have in common before they train together, compared line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.device.tensor_checks import memory_view
from mgpu_core.module_tree import named_parameters_of
from mgpu_core.processes.group import Processes

__all__ = ["check_agreement", "digest", "facts_of", "first_difference", "numbers_of"]

Facts = Mapping[str, Sequence[str]]


def check_agreement(processes: Processes, facts: Facts) -> None:
    """Compare facts with those of the other processes; all of them call it.

    Args:
        processes: which.
        facts: by topic, a line for each.

    Raises:
        ValueError: in all processes alike; names the topic, the process, and the first lines that differ.
    """
    found: list[Facts] = processes.exchange("settings", {topic: list(lines) for topic, lines in facts.items()})
    for topic, wanted in found[0].items():
        for process, theirs in enumerate(found):
            at = first_difference(wanted, theirs.get(topic, ()))
            if at is not None:
                raise ValueError(
                    f"processes differ in their {topic}: {_line(wanted, at)} in process 0, "
                    f"{_line(theirs.get(topic, ()), at)} in process {process}"
                )


def first_difference(wanted: Sequence[str], found: Sequence[str]) -> int | None:
    """Return the index at which two lists first differ; ``None``: they are equal."""
    return next((at for at, (one, other) in enumerate(zip_longest(wanted, found)) if one != other), None)


def _line(lines: Sequence[str], at: int) -> str:
    return lines[at] if at < len(lines) else "none"


def facts_of(net: Module, optimizer: Optimizer, settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Describe a net, an optimizer with its state, and settings; without the net's values."""
    names = {id(parameter): name for name, parameter in named_parameters_of(net)}
    members = [names.get(id(each), "?") for group in optimizer.param_groups for each in group["params"]]
    states = optimizer.state_dict()["state"]  # whole, where it is kept in shards
    return {
        "settings": [f"{name}={value}" for name, value in settings.items()],
        "parameters": [_described(name, each) for name, each in named_parameters_of(net)],
        "buffers": [_described(name, each) for name, each in net.named_buffers()],
        "optimizer": [type(optimizer).__name__, *(_group(group, names) for group in optimizer.param_groups)],
        "optimizer state": [
            f"{members[index]} {name} {digest(value) if torch.is_tensor(value) else type(value).__name__}"
            for index, state in states.items()
            if isinstance(index, int)  # an optimizer may keep things under names of its own
            for name, value in sorted(state.items())
        ],
    }


def _described(name: str, tensor: torch.Tensor) -> str:
    frozen = "" if tensor.requires_grad else ", without grad"
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}{frozen}"


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> str:
    members = ", ".join(names.get(id(each), "?") for each in group["params"])
    numbers = ", ".join(f"{name}={value}" for name, value in numbers_of(group).items())
    return f"{numbers}: {members}"


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, as JSON holds them: tensors as numbers, tuples as lists."""
    found = {name: _plain(value) for name, value in group.items() if name != "params"}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return the number, or ``None`` for another type."""
    if torch.is_tensor(value):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        plain = [_plain(each) for each in value]
        return None if None in plain else plain
    return value if isinstance(value, bool | int | float) else None


def digest(tensor: torch.Tensor) -> str:
    """Return a checksum of dtype, shape and every bit."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    values = tensor.detach().cpu().contiguous()
    found.update(memory_view(values))
    return found.hexdigest()
