"""Ctrl-C at moments when an exception would do harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["on_ctrl_c"]


@contextmanager
def on_ctrl_c(handle: Callable[[], object]) -> Iterator[None]:
    """Call a function at Ctrl-C inside the block, instead of raising; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
