"""A step that is too large for the page, thinned: the first and the last of many equal items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from mgpu_core.tools.explain.scene import Scene, plural
from mgpu_core.trace.events import NO_BUCKET

__all__ = ["thinned"]

T = TypeVar("T")


def thinned(step: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the page's data of a step with at most ``most`` buckets, collectives, bars per lane and layers per part.

    Rounds of a collective are kept or dropped together: a part of them would show wrong contents.
    """
    buckets = _ends(step["buckets"], most)
    kept = {NO_BUCKET, *(each["bucket"] for each in buckets)} if step["buckets"] else None
    scenes = _scenes(step["scenes"], kept, most)
    lanes = [lane | {"bars": _ends(_of(lane["bars"], kept), most)} for lane in step["lanes"]]
    spread = [
        module | {"parts": [part | {"layers": _ends(part["layers"], most)} for part in module["parts"]]}
        for module in step["parts"]
    ]
    bars, all_bars = (sum(len(lane["bars"]) for lane in every) for every in (lanes, step["lanes"]))
    less = {
        "bucket": len(step["buckets"]) - len(buckets),
        "scene": len(step["scenes"]) - len(scenes),
        "bar": all_bars - bars,
        "layer": _layers_in(step["parts"]) - _layers_in(spread),
    }
    told = ", ".join(plural(count, noun) for noun, count in less.items() if count)
    shown = {"buckets": buckets, "scenes": scenes, "lanes": lanes, "parts": spread}
    return step | shown | {"left_out": f"Too much for this page: {told}."}


def _layers_in(modules: Sequence[dict[str, Any]]) -> int:
    return sum(len(part["layers"]) for module in modules for part in module["parts"])


def _ends(every: Sequence[T], most: int) -> list[T]:
    return list(every) if len(every) <= most else [*every[: most // 2], *every[len(every) - most // 2 :]]


def _of(every: Sequence[dict[str, Any]], kept: set[int] | None) -> list[dict[str, Any]]:
    return [each for each in every if kept is None or each["bucket"] in kept]


def _scenes(scenes: Sequence[Scene], kept: set[int] | None, most: int) -> list[Scene]:
    """Return the scenes that are kept, in the same order."""
    calls: list[list[Scene]] = []
    for scene in scenes:
        if scene["kind"] == "round" and scene["round"] > 0 and calls:
            calls[-1].append(scene)
        elif scene["kind"] == "round":
            calls.append([scene])
    shown = _ends([call for call in calls if kept is None or call[0]["bucket"] in kept], most)
    others = [_with_ready_of(each, kept) for each in scenes if each["kind"] != "round"]
    kept_scenes = [*others, *(each for call in shown for each in _in_short(call, most))]
    return sorted(kept_scenes, key=lambda entry: (entry["begin"], entry["order"]))


def _with_ready_of(scene: Scene, kept: set[int] | None) -> Scene:
    return scene | {"ready": _of(scene["ready"], kept)} if "ready" in scene else scene


def _in_short(call: Sequence[Scene], most: int) -> Sequence[Scene]:
    """Return a call of many rounds as one scene, in which nothing travels."""
    if len(call) <= most:
        return call
    title, text = call[0]["title"].split(", round")[0], f"Its {len(call)} rounds are too much for this page."
    return [call[0] | {"title": title, "text": text, "end": call[-1]["end"], "rounds": 1, "arrows": [], "more": 0}]
