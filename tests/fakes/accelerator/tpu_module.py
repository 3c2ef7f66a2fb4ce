"""``torch.tpu`` over the fake accelerator, by the rules of torch_tpu 0.2: what it refuses to whom, and what it lacks.

It has no ``memory_stats``, ``mem_get_info`` and ``empty_cache``.  What ``torch.accelerator`` has as well may be called
by torch alone; everybody else gets an error that names the other.  The device is that of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from fakes.accelerator import device_module
from fakes.accelerator.device_module import (  # noqa: F401
    _initialized,
    _is_in_bad_fork,
    get_amp_supported_dtype,
    is_initialized,
)


def _for_torch_alone(function: Callable[..., Any], instead: str) -> Callable[..., Any]:
    """Returns the function, which refuses callers outside of torch as torch_tpu does: by the name of their module."""

    @wraps(function)
    def checked(*args: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.partition(".")[0] != "torch":
            raise RuntimeError(
                f"{function.__name__} is internal to TorchTPU and can only be called by the PyTorch framework (torch "
                f"and torch_tpu). Use torch.accelerator.{instead} instead."
            )
        return function(*args)

    return checked


def get_rng_state(which: int | str | torch.device = "tpu") -> torch.Tensor:
    return device_module.get_rng_state(which)


def set_rng_state(state: torch.Tensor, which: int | str | torch.device = "tpu") -> None:
    device_module.set_rng_state(state, which)


def manual_seed(seed: int) -> None:
    device_module.manual_seed(seed)


manual_seed_all = manual_seed  # of the one device

current_device = _for_torch_alone(device_module.current_device, "current_device_index")
device = _for_torch_alone(device_module.device, "device_index")
device_count = _for_torch_alone(device_module.device_count, "device_count")
get_rng_state = _for_torch_alone(get_rng_state, "random.get_rng_state")
is_available = _for_torch_alone(device_module.is_available, "is_available")
set_device = _for_torch_alone(device_module.set_device, "set_device_index")
synchronize = _for_torch_alone(device_module.synchronize, "synchronize")
