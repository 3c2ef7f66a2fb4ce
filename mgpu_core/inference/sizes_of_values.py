"""Operations whose outputs have a size that depends on values, such as ``nonzero``: found in the calls of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = ["SizesOfValues"]

_MASKS = (torch.bool, torch.uint8)
_PACKED = frozenset(("aten._pack_padded_sequence.default", "aten._pad_packed_sequence.default"))


class SizesOfValues(TorchDispatchMode):
    """Find an operation whose output has a size that depends on values, in calls inside.

    Attributes:
        found: its name; empty: there was none.
    """

    mgpu_core_thread_safe = True  # lanes of a Pipeline only write one attribute

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __enter__(self) -> SizesOfValues:  # the base class notes in globals that a mode is on, for all threads
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in _PACKED or (torch.Tag.dynamic_output_shape in func.tags and not _has_own_size(args, kwargs)):
            self.found = str(func).removesuffix(".default")
        return func(*args, **kwargs)


def _has_own_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the size is given, or that of numbers of rows: only masks choose by their values."""
    if kwargs.get("output_size") is not None:
        return True
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else None
    return indices is not None and not any(each is not None and each.dtype in _MASKS for each in indices)
