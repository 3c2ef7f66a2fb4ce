"""The devices that this process can use, their memory and their random numbers, of any accelerator.

``torch.accelerator`` is asked, for the modules of accelerators differ: ``torch.tpu`` refuses callers outside of torch,
and the random numbers of ``torch.mps`` are of no device by name.  ``None`` or a warning stands for all that one lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import Any

import torch

from mgpu_core.support.warnings import warn_user

__all__ = ["accelerator_type", "indices_of", "is_one_per_process", "numbers_of", "put_numbers_back", "total_nbytes"]

_ONE_PER_PROCESS = frozenset({"tpu"})  # torch counts all of the machine, and a process can use its own alone


def accelerator_type() -> str:
    """Return the device type that a bare index means: the current accelerator's, or ``cuda``."""
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


def is_one_per_process(kind: str) -> bool:
    """Return whether a process has one device of this kind, whichever its launcher has given to it."""
    return kind in _ONE_PER_PROCESS


def indices_of(kind: str) -> range:
    """Return the indices of the devices of a kind that this process can use."""
    count = torch.accelerator.device_count() if kind == accelerator_type() else 0
    if not count or not is_one_per_process(kind):
        return range(count)
    index = torch.accelerator.current_device_index()
    return range(index, index + 1)


def total_nbytes(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory; ``None`` where its plug-in does not tell, and for the CPU."""
    if device.type == "cpu":
        return None
    with suppress(RuntimeError, NotImplementedError):
        return int(torch.accelerator.get_memory_info(device)[1]) or None
    return None


def numbers_of(devices: Iterable[torch.device]) -> dict[torch.device, torch.Tensor]:
    """Return the states of the generators of accelerators; a warning names a kind whose plug-in keeps its own."""
    states = {device: _state_of(device) for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")}
    return {device: state for device, state in states.items() if state is not None}


def put_numbers_back(states: Mapping[torch.device, torch.Tensor]) -> None:
    """Give the generators of accelerators these states."""
    for device, state in states.items():
        _called(torch.get_device_module(device).set_rng_state, state.cpu(), device)


def _state_of(device: torch.device) -> torch.Tensor | None:
    module = torch.get_device_module(device)
    if not hasattr(module, "set_rng_state"):
        _warn_of_numbers(device.type)
        return None
    of_torch = getattr(torch.accelerator, "random", module)  # torch 2.13 and newer; then plug-ins may refuse theirs
    state: torch.Tensor = _called(of_torch.get_rng_state, device)
    return state


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with as many of the arguments as it takes: where there is one device, it may not be named."""
    return function(*arguments[: _most_arguments(function)])


@cache
def _most_arguments(function: Callable[..., Any]) -> int:
    return len(signature(function).parameters)


@cache
def _warn_of_numbers(kind: str) -> None:
    warn_user(
        f"the plug-in for {kind} has no torch.{kind}.set_rng_state: random numbers there are neither kept in a "
        "checkpoint nor drawn again after a trial run",
        RuntimeWarning,
    )
