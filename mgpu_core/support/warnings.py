"""Warnings that point at the user's line, however deep in the package they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

import torch

__all__ = ["from_here", "is_ours", "is_users", "warn_user"]

_PACKAGES = Path(__file__).absolute().parents[1], Path(str(torch.__file__)).absolute().parent
_NOT_THE_USERS = (*(f"{folder}{os.sep}" for folder in _PACKAGES), contextlib.__file__)


def is_users(filename: str) -> bool:
    """Return whether a file is neither this package's nor torch's."""
    return not filename.startswith(_NOT_THE_USERS)


def is_ours(filename: str) -> bool:
    """Return whether a file is this package's code; the pages of its lessons are their readers'."""
    return filename.startswith(_NOT_THE_USERS[0]) and filename.endswith(".py")


_made_at: ContextVar[tuple[str, int] | None] = ContextVar("made_at", default=None)


@contextlib.contextmanager
def from_here() -> Iterator[None]:
    """Let warnings of threads that get the context inside point at the user's line that calls this."""
    frame = _users_frame()[1]
    token = _made_at.set((frame.f_code.co_filename, frame.f_lineno))
    try:
        yield
    finally:
        _made_at.reset(token)


def _users_frame() -> tuple[int, FrameType]:
    """Return the nearest frame that is neither this package's nor torch's, and its level for the caller."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    return level, frame


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn in the nearest line that is neither this package's nor torch's; in a thread of ours, where it was made."""
    level, frame = _users_frame()
    made_at = _made_at.get()
    if made_at is None or frame.f_code.co_filename != threading.__file__:
        warnings.warn(message, category, stacklevel=level + 1)
    else:
        warnings.warn_explicit(message, category, *made_at)
