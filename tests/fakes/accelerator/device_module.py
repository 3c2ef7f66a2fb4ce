"""``torch.fake``: the functions that torch looks for in the module of a device type.

It is a module of its own because torch's generic code (``torch.accelerator``, autocast, checkpoints, ``manual_seed``)
finds it by the name of the device type and calls what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

built = None  # the compiled half; set when it is there
_initialized = True  # what a checkpoint asks before it looks after the random numbers


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return built.devices


def current_device() -> int:
    return built.current()


def set_device(which: int | str | torch.device) -> None:
    built.make_current(_index(which))


@contextmanager
def device(which: int | str | torch.device) -> Iterator[None]:
    before = current_device()
    set_device(which)
    try:
        yield
    finally:
        set_device(before)


def synchronize(which: int | str | torch.device | None = None) -> None:
    torch.accelerator.synchronize(_index(which))


def memory_allocated(which: int | str | torch.device | None = None) -> int:
    return built.allocated(_index(which))


def max_memory_allocated(which: int | str | torch.device | None = None) -> int:
    return built.most_allocated(_index(which))


def reset_peak_memory_stats() -> None:
    built.forget_most_allocated()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def manual_seed(seed: int) -> None:
    built.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        built.default_generator(index).manual_seed(seed)


def get_rng_state(which: int | str | torch.device | None = None) -> torch.Tensor:
    return built.default_generator(_index(which)).get_state()


def set_rng_state(state: torch.Tensor, which: int | str | torch.device | None = None) -> None:
    built.default_generator(_index(which)).set_state(state)


def _index(which: int | str | torch.device | None) -> int:
    index = which if which is None or isinstance(which, int) else torch.device(which).index
    return current_device() if index is None else index
