"""Tensors without memory: they keep shape, dtype and identity, and to read or write an element is an error.

Torch keeps a text with a storage without memory, and raises it from any access: of views, in C++, by numpy and by
pickle.  The functions for that are private, and are called in this file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

__all__ = ["absent_like", "cells_of", "drop_memory", "hide", "restore_memory", "show", "why_not_absent"]

_set_text = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_clear_text = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
_storage_at = getattr(torch._C, "_construct_storage_from_data_pointer", None)
_cell_of = attrgetter("_cdata")


def why_not_absent(devices: Sequence[torch.device]) -> str | None:
    """Return why tensors on these devices cannot be without memory; ``None``: they can."""
    if _set_text is None or _clear_text is None or _storage_at is None:
        return f"torch {torch.__version__} cannot take the memory of a tensor away and give it back"
    for device in devices:
        tensor = torch.empty(1, device=device)
        try:
            drop_memory(tensor, "this is a test")
            restore_memory(tensor, "this is a test")
        except NotImplementedError:
            return f"torch cannot give memory back to a tensor on {device.type} devices"
    return None


def drop_memory(tensor: torch.Tensor, text: str) -> None:
    """Free the memory of a tensor's storage; any access raises RuntimeError from now on, most with this text.

    The storage has no bytes then: new views of it (a transposed one, a slice) are refused in torch's own words.
    """
    assert _set_text is not None
    assert _clear_text is not None
    storage = tensor.untyped_storage()
    _clear_text(storage._cdata)  # there may be one already
    storage.resize_(0)
    _set_text(storage._cdata, text)


def absent_like(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """Return a flat tensor that never has memory: any access raises RuntimeError with this text, also by new views."""
    assert _set_text is not None
    assert _storage_at is not None
    storage = _storage_at(0, tensor.device, tensor.numel() * tensor.itemsize)
    absent = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, (1,))
    _set_text(storage._cdata, text)
    return absent


def restore_memory(tensor: torch.Tensor, text: str) -> None:
    """Give the storage of a whole tensor memory again, on the current stream of its device, without its values.

    Raises:
        torch.OutOfMemoryError: there is none; the storage has none then, and the text.
    """
    assert _clear_text is not None
    storage = tensor.untyped_storage()
    try:
        _clear_text(storage._cdata)
        storage.resize_(tensor.nbytes)
    except BaseException:
        drop_memory(tensor, text)
        raise


def hide(tensor: torch.Tensor, text: str) -> None:
    """Let any access raise RuntimeError with this text, while the tensor keeps its memory."""
    assert _set_text is not None
    _set_text(tensor.untyped_storage()._cdata, text)


def show(tensor: torch.Tensor) -> None:
    """End that."""
    assert _clear_text is not None
    _clear_text(tensor.untyped_storage()._cdata)


def cells_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return which storages tensors are views of, and how: also of storages without memory."""
    return (
        list(map(_cell_of, map(torch.Tensor.untyped_storage, tensors))),
        list(map(torch.Tensor.storage_offset, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(torch.Tensor.size, tensors)),
        list(map(attrgetter("dtype"), tensors)),
    )
