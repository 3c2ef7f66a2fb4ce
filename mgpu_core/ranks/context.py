"""The context of a thread (modes, autocast, contextvars, random numbers, ...), carried from the caller to the workers.

Grad mode, inference mode, autocast, saved-tensor hooks and modes are settings of a thread; a new thread has the
defaults.  Each rank also runs in a copy of the caller's ``contextvars`` of its own, because one context cannot be
entered by two threads at once.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from mgpu_core.ranks.modes import Modes
from mgpu_core.ranks.random import RankStream
from mgpu_core.support.null_context import NULL_CONTEXT

__all__ = ["CallerContext", "checkpoint_closure", "checkpoint_frame"]


class CallerContext:
    """The calling thread's settings, read when the object is made.

    Args:
        devices: one per rank.
        numbers: the stream of random numbers of each rank; ``None``: there are none.

    Attributes:
        serialize: the ranks must run one after the other.

    Raises:
        TypeError: a mode or a transform that must not leave its thread.
    """

    def __init__(self, devices: Sequence[torch.device], numbers: Sequence[RankStream] | None = None) -> None:
        self._devices, self._numbers = devices, numbers
        self._modes = Modes(devices)
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._hooks, self.serialize = _saved_tensors_hooks(len(set(devices)) == 1)

    def _entered(self) -> AbstractContextManager[object]:
        """Return the modes that are seldom on: autocast and hooks."""
        if not self._autocast and self._hooks is None:
            return NULL_CONTEXT
        stack = ExitStack()
        for kind, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_cache))
        if self._hooks is not None:
            stack.enter_context(self._hooks())
        return stack

    def bind(self, work: Callable[[], Any], rank: int) -> Callable[[], Any]:
        """``work`` as a task for a worker: there it runs under these settings, as this rank."""
        variables, device = contextvars.copy_context(), self._devices[rank]
        numbers = None if self._numbers is None else self._numbers[rank]

        def task() -> Any:
            # Inference mode's end puts back all that a rank may have changed: grad mode and autocast, too.
            with (
                NULL_CONTEXT if numbers is None else numbers.entered(),
                torch.inference_mode(self._inference),
                self._entered(),
                self._modes.entered(device),
            ):
                torch.set_grad_enabled(self._grad)
                return variables.run(work)

        return task


def checkpoint_frame() -> Any:
    """Return an object of the checkpoint of torch that this thread is inside of; ``None``: of none."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top[0] if top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint" else None


def checkpoint_closure() -> dict[str, Any] | None:
    """Return the closure of the checkpoint that this thread is inside of; ``None``: it is in none.

    In the forward ``frame``, an object of the checkpoint; when it runs again ``target_frame_ref``, a weak reference to
    the same object, and ``gid``, the backward.
    """
    hook = checkpoint_frame()
    while hasattr(hook, "__wrapped__"):
        hook = hook.__wrapped__
    if hook is None:
        return None
    return dict(zip(hook.__code__.co_freevars, [each.cell_contents for each in hook.__closure__ or ()], strict=True))


def _saved_tensors_hooks(one_device: bool) -> tuple[Callable[[], AbstractContextManager[None]] | None, bool]:
    """Return a function that installs this thread's hooks in another, or ``None``; and whether they need one order.

    A checkpoint finds a tensor again by its index among all that were saved, so the ranks must save theirs in one order
    in the forward and when it runs again: they take turns.  Over several devices its hooks are not carried along:
    backward has a thread per device then, which would all start the second forward at once, and torch's checkpoint is
    not made for that.  Nothing is saved, but nothing is wrong.
    """
    engine: Any = torch._C._autograd
    banned = engine._saved_tensors_hooks_get_disabled_error_message()
    if banned is not None:
        return partial(torch.autograd.graph.disable_saved_tensors_hooks, banned), False
    top = engine._top_saved_tensors_default_hooks(False)
    ordered = checkpoint_frame() is not None
    if top is None or (ordered and not one_device):
        return None, False
    return partial(torch.autograd.graph.saved_tensors_hooks, *top), ordered
