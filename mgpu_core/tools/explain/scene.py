"""Helpers of all scenes."""

from __future__ import annotations

from typing import Any, TypeAlias

from mgpu_core.tools.explain.steps import Step

__all__ = ["Scene", "plural", "scene", "us"]

Scene: TypeAlias = dict[str, Any]


def us(step: Step, at_ns: int) -> float:
    """Return the microseconds since the begin of the step."""
    return round((at_ns - step.begin_ns) / 1e3, 3)


def scene(step: Step, kind: str, title: str, text: str, times: tuple[int, int], order: int = 0, **more: Any) -> Scene:
    """Return one scene; ``order`` ranks scenes that begin at the same time."""
    begin, end = (us(step, at) for at in times)
    return {"kind": kind, "title": title, "text": text, "begin": begin, "end": end, "order": order, **more}


def plural(count: int, noun: str) -> str:
    """``3 rows``, ``1 row``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
