"""Warnings that point at the user's line, however deep in the package they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

__all__ = ["is_ours", "is_users", "warn_user"]

_PACKAGES = Path(__file__).absolute().parents[1], Path(str(torch.__file__)).absolute().parent
_NOT_THE_USERS = (*(f"{folder}{os.sep}" for folder in _PACKAGES), contextlib.__file__)


def is_users(filename: str) -> bool:
    """Return whether a file is neither this package's nor torch's."""
    return not filename.startswith(_NOT_THE_USERS)


def is_ours(filename: str) -> bool:
    """Return whether a file is this package's code; the pages of its lessons are their readers'."""
    return filename.startswith(_NOT_THE_USERS[0]) and filename.endswith(".py")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn in the nearest line that is neither this package's nor torch's; in a thread of ours, at its start."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
