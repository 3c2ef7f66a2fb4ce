"""On a machine without an accelerator, CUDA devices that a script names mean the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["Device", "moving_nowhere"]

_torchs = torch.device


class _Known(type):
    """Lets every ``torch.device`` be an instance of the stand-in."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _torchs)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _torchs)


class Device(metaclass=_Known):
    """``torch.device``, which makes the CPU of a CUDA device."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return torch's object."""
        first = args[0] if args else kwargs.get("device", kwargs.get("type"))
        is_cuda = isinstance(first, int) or (isinstance(first, str) and first.split(":")[0] == "cuda")
        return _torchs("cpu") if is_cuda else _torchs(*args, **kwargs)


def moving_nowhere(to: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method ``to`` of a tensor or a module for which CUDA devices mean the CPU."""

    @wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_host(kwargs["device"])
        return to(self, *(_on_host(each) for each in args[:1]), *args[1:], **kwargs)

    return moved


def _on_host(value: Any) -> Any:
    is_index = isinstance(value, int) and not isinstance(value, bool)
    is_cuda = isinstance(value, str) and value.split(":")[0] == "cuda"
    return _torchs("cpu") if is_index or is_cuda or (isinstance(value, _torchs) and value.type == "cuda") else value
