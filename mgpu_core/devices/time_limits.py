"""How long calls wait: variables of the environment, read at each call."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["TIMEOUT_VARIABLE", "seconds_of", "time_limit"]

TIMEOUT_VARIABLE = "MGPU_CORE_TIMEOUT"


def time_limit() -> float:
    """Return the seconds that a call waits for its ranks: ``MGPU_CORE_TIMEOUT``, else half an hour.

    Raises:
        ValueError: the variable is not a positive number.
    """
    return seconds_of(TIMEOUT_VARIABLE, "1800", threading.TIMEOUT_MAX)


def seconds_of(variable: str, default: str, most: float) -> float:
    """Return the seconds that a variable of the environment asks for.

    Raises:
        ValueError: it is not a positive number, or above ``most``.
    """
    text = os.environ.get(variable, "").strip() or default
    with suppress(ValueError):
        if 0 < float(text) <= most:
            return float(text)
    raise ValueError(f"{variable} must be a positive number of seconds, up to {most:.0f}, not {text!r}")
