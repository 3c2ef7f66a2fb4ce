"""Read an advice from its JSON."""

from __future__ import annotations

import json
from typing import Any

from mgpu_core.tools.advise.break_even import BreakEven
from mgpu_core.tools.advise.data import Measurement
from mgpu_core.tools.advise.host_share import HostShare
from mgpu_core.tools.advise.memory import Memory
from mgpu_core.tools.advise.reasons import Reason
from mgpu_core.tools.advise.recommend import Recommendation
from mgpu_core.tools.advise.shares import StepShares

__all__ = ["FORMAT", "read"]

FORMAT = "mgpu_core advice 1"


def read(text: str) -> dict[str, Any]:
    """Return the fields of the advice that was written as ``text``; raise ValueError if it is no such text."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'not advice: wanted a JSON object with "format": "{FORMAT}"')
    try:
        return _fields(content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not advice: a field is missing or wrong ({error})") from error


def _fields(content: dict[str, Any]) -> dict[str, Any]:
    memory, shares, host = content["memory"], content["shares"], content.get("host")  # older ones have no host
    return {
        "devices": tuple(content["devices"]),
        "rows": content["rows"],
        "measurements": tuple(
            Measurement(told["way"], told["batch"], tuple(told["seconds"]), told["error"])
            for told in content["measurements"]
        ),
        "break_even": BreakEven(**content["break_even"]),
        "memory": None if memory is None else Memory(**memory | {"peaks": tuple(map(tuple, memory["peaks"]))}),
        "shares": None if shares is None else StepShares(**shares),
        "host": None if host is None else HostShare(**host),
        "loader_s": content["loader_s"],
        "reason": Reason(**content["reason"]),
        "recommendation": Recommendation(**content["recommendation"]),
        "notes": tuple(content["notes"]),
        "environment": content["environment"],
    }
