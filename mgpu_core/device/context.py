"""What a thread carries besides its arguments, taken from the caller to the workers.

Grad mode, inference mode and autocast are settings of a thread; a new thread has the defaults.  Each rank also runs in
a copy of the caller's ``contextvars`` of its own, because one context cannot be entered by two threads at once.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["CallerContext"]


class CallerContext:
    """The calling thread's settings, read when the object is made."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        found = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if found is None else ["cpu", found.type]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_cache))
            yield

    def bind(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """``work`` as a task for another thread: there it runs under these settings."""
        variables = contextvars.copy_context()

        def task() -> Any:
            with self._entered():
                return variables.run(work)

        return task
