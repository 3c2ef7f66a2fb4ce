"""The picture: speed-up over one device against the batch, for each way, with the break-even.

matplotlib is an extra, imported only here and only when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mgpu_core.support.extras import require
from mgpu_core.support.files import write_whole
from mgpu_core.tools.advise.data import AdviceData, best_speedups
from mgpu_core.tools.advise.strategies import NAMES, ONE
from mgpu_core.tools.advise.text import notes_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "figure_of"]

_COLOURS = dict(zip(NAMES, ("black", "tab:orange", "tab:blue", "tab:green"), strict=True))


def draw(advice: AdviceData, path: Path) -> None:
    """Write a PNG, whole or not at all; see :meth:`Advice.plot`."""
    require("matplotlib", "a picture")
    figure = figure_of(advice)
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=120))


def figure_of(advice: AdviceData) -> Figure:
    """Return the picture itself; the notes of the table stand below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axis = figure.subplots()
    axis.set_xscale("log", base=2)
    axis.axhline(1.0, color=_COLOURS[ONE], linewidth=1.5, label=ONE)
    if advice.break_even.kind == "at" and advice.break_even.rows is not None:
        axis.axvline(advice.break_even.rows, color="tab:red", linestyle="--", linewidth=1, label="break-even")
    for index, way in enumerate(each for each in advice.ways if each != ONE):
        _draw_way(axis, advice, way, 1.0 + 0.015 * index)
    axis.set(xlabel="batch, rows", ylabel="times as fast as one device")
    axis.set_ylim(0, 1.3 * max([1.0, *best_speedups(advice.medians).values()]))  # a bar may be cut off, a median not
    axis.set_xticks(advice.batches, [f"{each} *" if each == advice.rows else str(each) for each in advice.batches])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(loc="best", fontsize=9)
    figure.suptitle(_title(advice), fontsize=10)
    figure.supxlabel("\n".join(fill(f"note: {each}", 100) for each in notes_of(advice)), fontsize=8)
    return figure


def _title(advice: AdviceData) -> str:
    xs = list(dict.fromkeys(advice.devices))
    where = ", ".join(xs) if len(xs) <= 4 else f"{len(xs)} devices"
    measured = f"{len(advice.devices)} ranks on {where}; break-even: {advice.break_even}"
    return f"{measured}\n* the sample's own batch; bars: the middle half of the rounds"


def _draw_way(axis: Any, advice: AdviceData, way: str, shift: float) -> None:
    """Draw its medians, with bars of the speed-ups of single rounds, shifted a little to keep bars apart."""
    batches = [batch for batch in advice.batches if advice.speedup(way, batch) is not None]
    middles = [advice.speedup(way, batch) or 0.0 for batch in batches]
    bars = [_quartiles(_of_rounds(advice, way, batch), middle) for batch, middle in zip(batches, middles, strict=True)]
    errors = [[max(0.0, m - low) for m, (low, _) in zip(middles, bars, strict=True)],
              [max(0.0, high - m) for m, (_, high) in zip(middles, bars, strict=True)]]  # fmt: skip
    xs = [batch * shift for batch in batches]
    axis.errorbar(xs, middles, errors, fmt="o-", capsize=3, color=_COLOURS[way], label=way)


def _of_rounds(advice: AdviceData, way: str, batch: int) -> list[float]:
    """Return the speed-up of each round, in which both strategies ran one after the other."""
    seconds = {each.way: each.seconds for each in advice.measurements if each.batch == batch}
    return [one / other for one, other in zip(seconds[ONE], seconds[way], strict=False)]


def _quartiles(values: Sequence[float], middle: float) -> tuple[float, float]:
    if len(values) < 3:
        return middle, middle
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
