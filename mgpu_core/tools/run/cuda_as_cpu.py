"""On a machine without an accelerator, CUDA devices that a script names mean the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CudaAsCpu", "loading_on_host", "no_gpu"]

_to, _cuda = torch.Tensor.to, torch.Tensor.cuda


class CudaAsCpu(TorchFunctionMode):
    """Calls of torch's functions and of tensors' methods, in which CUDA devices mean the CPU.

    A mode, not a stand-in for ``torch.device``: scripts, compilers and schemas of operators know that class.  It holds
    in the thread that enters it, and in the ranks of its calls.
    """

    mgpu_core_thread_safe = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        if function is _cuda:
            return args[0]
        if function is _to:
            args = (args[0], *map(_on_host, args[1:2]), *args[2:])
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _on_host(kwargs["device"])}
        return function(*args, **(kwargs or {}))


def loading_on_host(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.load`` with CUDA devices as ``map_location`` that mean the CPU."""

    @wraps(load)
    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, _on_host(map_location), *args, **kwargs)

    return loaded


def no_gpu() -> NoReturn:
    """Raise the error of a function of ``torch.cuda`` that needs a GPU, in place of torch's about a driver."""
    raise RuntimeError(
        "on CPU ranks there is no GPU: CUDA devices mean the CPU where tensors and modules are made and moved, in the "
        "main thread; this is another function of torch.cuda, or a thread of the script's own. Call it only if "
        "torch.cuda.is_available()"
    )


def _on_host(value: Any) -> Any:
    is_index = isinstance(value, int) and not isinstance(value, bool)
    is_cuda = isinstance(value, str) and value.split(":")[0] == "cuda"
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_index or is_cuda or is_device else value
