"""Keep a step atomic: nothing persistent changes before all ranks are through, and then all of it does."""

from __future__ import annotations

# What `signal` wraps: its enumerations take nine tenths of the time, in every step.
import _signal  # type: ignore[import-not-found]  # mypy has no stub of it
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.step.rank_modules import RankModules

__all__ = ["BufferSnapshot", "uninterrupted"]


class BufferSnapshot:
    """The buffers of modules as they were: running statistics that a step which fails must not have moved.

    Memory for the copies is kept from one time to the next.

    Attributes:
        is_taken: there are buffers that may be put back.
    """

    def __init__(self, modules: Sequence[RankModules]) -> None:
        self._modules = modules
        self.is_taken = False
        self._names: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def take(self) -> None:
        """Copy the buffers that there are now."""
        self.is_taken = False
        for modules in self._modules:
            if modules.tree.buffers:
                self._copy()
                self.is_taken = True
                return

    def _copy(self) -> None:
        names = [
            (node.module._buffers, name)
            for modules in self._modules
            if modules.tree.buffers
            for node in modules.tree.nodes
            for name, _ in node.buffers
        ]
        buffers: list[Any] = [of[name] for of, name in names]
        if len(buffers) != len(self._buffers) or not all(map(_is_like, buffers, self._buffers, self._values)):
            self._values = [buffer.detach().clone() for buffer in buffers]
            # Torch copies tensors of one device and dtype in one launch, and others one by one.
            groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for values, buffer in zip(self._values, buffers, strict=True):
                targets, sources = groups.setdefault((buffer.device, buffer.dtype), ([], []))
                targets.append(values)
                sources.append(buffer)
            self._groups = list(groups.values())
        else:
            with torch.no_grad():
                for targets, sources in self._groups:
                    torch._foreach_copy_(targets, sources)
        self._names, self._buffers = names, buffers

    @torch.no_grad()
    def restore(self) -> None:
        """Put the same tensors back, with the values that they had; do nothing after a drop."""
        for (of, name), buffer, values in zip(self._names, self._buffers, self._values, strict=False):
            if torch._debug_has_internal_overlap(buffer) != 1:  # an expanded one cannot have been written
                buffer.copy_(values)
            of[name] = buffer
        self.drop()

    def drop(self) -> None:
        """Keep the buffers as they are now."""
        self.is_taken, self._names = False, []


def _is_like(buffer: torch.Tensor, before: torch.Tensor, values: torch.Tensor) -> bool:
    return buffer is before and buffer.shape == values.shape and buffer.dtype == values.dtype


class uninterrupted:  # noqa: N801  # as contextlib's own
    """Ctrl-C waits until the end: the handler of SIGINT runs then.  Outside the main thread signals do not come."""

    __slots__ = ("_before", "_came")

    def __enter__(self) -> None:
        self._came: list[tuple[int, Any]] = []
        self._before: Any = _signal.getsignal(_signal.SIGINT)
        if self._before is None or type(self._before) is int:  # no Python handler is set
            self._before = None
        else:
            try:
                _signal.signal(_signal.SIGINT, self._keep)
            except ValueError:  # this is not the main thread
                self._before = None

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(_signal.SIGINT, self._before)
            if self._came:
                self._before(*self._came[0])

    def _keep(self, number: int, frame: Any) -> None:
        self._came.append((number, frame))
