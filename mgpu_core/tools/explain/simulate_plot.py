"""The picture of a simulation: the parts of a step at each number of GPUs, and the efficiency above it.

matplotlib is an extra, imported only here and only when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_core.support.files import write_whole
from mgpu_core.tools.explain.predict import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "figure_of"]

_PARTS = {
    "compute_s": "compute",
    "update_s": "update",
    "exposed_s": "exposed communication",
    "broadcast_s": "broadcast of the module",
    "input_s": "input",
    "host_s": "host",
}


def draw(title: str, found: Sequence[Prediction], path: Path) -> None:
    """Write a PNG, whole or not at all."""
    figure = figure_of(title, found)
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=120))


def figure_of(title: str, found: Sequence[Prediction]) -> Figure:
    """Return the picture itself; its legend is below the bars, to keep them visible."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 1.2 * len(found)), 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    xs = range(len(found))
    above.plot(xs, [100 * each.efficiency for each in found], "o-")
    above.set(ylabel="efficiency, %", ylim=(0, 105))
    bottom = [0.0] * len(found)
    for field, name in _PARTS.items():
        heights = [1e3 * getattr(each, field) for each in found]
        below.bar(xs, heights, 0.6, bottom=bottom, label=name)
        bottom = [one + two for one, two in zip(bottom, heights, strict=True)]
    below.set(ylabel="time per step, ms", xlabel="number of GPUs")
    below.set_xticks(xs, [str(each.gpus) for each in found])
    for axis in (above, below):
        axis.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(_PARTS) // 2)
    figure.suptitle(title, fontsize=9)
    return figure
