"""Rows that travel: a batch on its way to the ranks, outputs on theirs back, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from mgpu_core.support.tables import human_nbytes
from mgpu_core.tools.explain.enclosing import Enclosing
from mgpu_core.tools.explain.scene import Scene, plural, scene
from mgpu_core.tools.explain.steps import Step
from mgpu_core.trace.events import GATHER_BACK, SCATTER_BACK, Collective, Cut, Span

__all__ = ["of_cuts", "without_cutting"]


def without_cutting(
    calls: Sequence[Collective], enclosing: Enclosing, cutting: Sequence[Span | None]
) -> list[Collective]:
    """Return the calls without those of cuts, which have scenes of their own."""
    shown = {id(span) for span in cutting if span is not None}

    def is_shown(call: Collective) -> bool:
        names = [name for name, (kind, _) in _CUTS.items() if kind == call.operation]
        return any(id(enclosing.span(call.thread, name, call.host_begin_ns)) in shown for name in names)

    return [call for call in calls if not is_shown(call)]


def of_cuts(step: Step, spans: Sequence[Span | None]) -> Iterator[Scene]:
    """Return one scene for all tensors that are cut, or joined, in one of these spans."""
    shown = [(cut, span) for cut, span in zip(step.cuts, spans, strict=True) if cut.route != "copies"]
    together = groupby(shown, key=lambda pair: (pair[0].step, pair[0].counts, pair[1]))
    for (name, counts, span), group in together:
        cuts = [cut for cut, _ in group]
        kind, what = _CUTS[name]
        times = (span.host_begin_ns, span.host_end_ns) if span else (cuts[0].host_begin_ns, cuts[-1].host_begin_ns)
        yield scene(
            step,
            kind,
            f"{name.capitalize()}: {plural(sum(counts), 'row')}, {plural(len(counts), 'rank')}",
            _text_of_cut(name, cuts),
            times,
            what=what,
            counts=list(counts),
            tensors=[_tensor(cut) for cut in cuts],
        )


_CUTS = {
    "scatter": ("scatter", "batch"),
    "gather": ("gather", "outputs"),
    SCATTER_BACK: ("scatter", "gradient of the outputs"),
    GATHER_BACK: ("gather", "gradient of the batch"),
}


def _text_of_cut(name: str, cuts: Sequence[Cut]) -> str:
    moved = human_nbytes(sum(sum(cut.nbytes) for cut in cuts))
    shares = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(cuts[0].counts))
    if name == "gather":
        return f"The ranks' outputs are joined on {cuts[0].source} ({moved}; {shares})."
    if name == GATHER_BACK:
        return f"The gradients of the ranks' rows are joined on {cuts[0].source} ({moved}; {shares})."
    if name == SCATTER_BACK:
        return f"The rows of the output's gradient go to the ranks that made the output ({shares}; {moved})."
    routes = {cut.route for cut in cuts}
    if routes <= {"view", "whole"}:
        return f"Rows go to their ranks ({shares}). All ranks share the batch's device: they get views, no byte moves."
    return f"Rows are copied to their ranks ({shares}; {moved})."


def _tensor(cut: Cut) -> dict[str, Any]:
    names = ("name", "dtype", "route", "source", "dim")
    return {name: getattr(cut, name) for name in names} | {
        "shapes": [list(shape) for shape in cut.shapes],
        "nbytes": list(cut.nbytes),
    }
