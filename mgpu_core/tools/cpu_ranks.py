"""Code that runs on CPU ranks: GPUs are hidden, and CUDA devices that it names mean the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from mgpu_core.devices.devices import has_accelerator

__all__ = ["on_cpu_ranks", "replaced_attribute"]

RANKS = "MGPU_CORE_CPU_RANKS"

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


@contextmanager
def on_cpu_ranks(ranks: int | None, *, hide: bool = False) -> Iterator[None]:
    """Let code inside the block run on CPU ranks, as ``replacing_torch(ranks=)`` says; ``None`` changes nothing.

    Args:
        ranks: how many.
        hide: hide GPUs from torch for the rest of the process, which has not used one yet.

    Raises:
        ValueError: ``ranks`` is not 1 to 9999, or there is an accelerator.
    """
    if ranks is None:
        yield
        return
    if not 1 <= ranks <= 9999:
        raise ValueError(f"ranks must be a whole number from 1 to 9999, not {ranks}")
    if hide:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch reads it at its first use of a GPU
    if has_accelerator():
        raise ValueError("CPU ranks are for a machine without an accelerator: hide it, or leave ranks out")
    with (
        _variable(RANKS, str(ranks)),
        CudaAsCpu(),
        replaced_attribute(torch, "load", loading_on_host(torch.load)),
        replaced_attribute(torch.cuda, "_lazy_init", no_gpu),
    ):
        yield


@contextmanager
def replaced_attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the block."""
    before = vars(holder).get(name)  # a class may inherit it
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
