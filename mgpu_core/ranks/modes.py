"""The mode stacks of a thread, which torch's functions pass on their way to a kernel.

``with torch.device(...)``, ``TorchFunctionMode``, ``TorchDispatchMode`` and the transforms of ``torch.func`` belong to
the thread that entered them.  A rank that runs elsewhere would silently miss them, so they are either taken along or
refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from mgpu_core.devices.devices import as_device
from mgpu_core.ranks.random import RankStream

__all__ = ["Modes", "check_modes"]

SAFE = "mgpu_core_thread_safe"


class Modes:
    """The calling thread's modes, read when the object is made.

    Args:
        team: one device per rank.

    Raises:
        TypeError: a mode that does not say ``mgpu_core_thread_safe = True``, or a transform of ``torch.func``.
    """

    def __init__(self, team: Sequence[torch.device]) -> None:
        functions, dispatches = _stacks()
        _check(functions, dispatches)
        contexts = [mode for mode in functions if isinstance(mode, DeviceContext)]
        self._context = contexts[-1] if contexts else None
        default = None if self._context is None else self._context.device
        self._ours = default is not None and default.type in {each.type for each in team} and as_device(default) in team
        self._functions = functions
        self._dispatches = [mode for mode in dispatches if not isinstance(mode, RankStream)]

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Return the same modes for the worker of a rank; a default device of the team becomes the rank's own."""
        dispatches, functions = _len_torch_dispatch_stack(), _len_torch_function_stack()
        # Pushed, not entered: `__enter__` of a mode notes in globals what was there before, and several threads that
        # come and go would leave them wrong for good.
        for mode in self._functions:
            _push_function_mode(DeviceContext(device) if self._ours and mode is self._context else mode)
        for mode in self._dispatches:
            _push_dispatch_mode(mode)
        try:
            yield
        finally:  # also modes that the rank did not leave: the thread is used again
            while _len_torch_dispatch_stack() > dispatches:
                _pop_dispatch_mode()
            while _len_torch_function_stack() > functions:
                _pop_function_mode()


def check_modes() -> None:
    """Raise TypeError for a mode or a transform, active in this thread, that must not leave it."""
    _check(*_stacks())


def _stacks() -> tuple[list[Any], list[Any]]:
    """Return the calling thread's modes; as a rule there are none."""
    functions = _get_current_function_mode_stack() if _len_torch_function_stack() else []
    return functions, _get_current_dispatch_mode_stack() if _len_torch_dispatch_stack() else []


def _check(functions: Sequence[Any], dispatches: Sequence[Any]) -> None:
    _refuse_transforms()
    for mode in (*functions, *dispatches):
        if not isinstance(mode, DeviceContext | RankStream) and not getattr(mode, SAFE, False):
            raise TypeError(_advice(mode))


def _refuse_transforms() -> None:
    functorch = torch._C._functorch
    interpreter = functorch.peek_interpreter_stack()
    if interpreter is not None:
        name = str(interpreter.key()).rsplit(".", 1)[-1].lower()
        raise TypeError(
            f"a forward over several ranks cannot run inside torch.func.{name}: the transform belongs to the calling "
            "thread and would not reach the ranks. Use the plain module (`.module`) there."
        )


def _advice(mode: TorchFunctionMode | TorchDispatchMode) -> str:
    kind = "TorchFunctionMode" if isinstance(mode, TorchFunctionMode) else "TorchDispatchMode"
    return (
        f"{type(mode).__name__} is an active {kind}, and a forward over several ranks runs in several threads at once. "
        f"If it may be called from them, say so with `{SAFE} = True` in its class; else use the plain module "
        "(`.module`) there."
    )
