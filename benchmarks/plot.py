"""Pictures of results: rates over sizes where there are several sizes, else bars of ratios.

Only ratios can be compared between rows and runs, so a bar is a contestant's median over ours; our own time stands
below as a number.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.case import Row, describe
from benchmarks.timing import OURS, PER_SECOND, median, p90, significant
from mgpu_core.extras import require
from mgpu_core.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.result import Result


def draw(result: "Result", path: Path) -> None:
    """Writes a PNG. `ModuleNotFoundError` with the cure if matplotlib is missing."""
    require("matplotlib", "a picture")
    from matplotlib.figure import Figure

    sweep = result.rows[0].bus_factor is not None and len({row.labels["size"] for row in result.rows}) > 1
    panels = _panels(result.rows) if sweep else {"": result.rows}
    width = 4.5 * len(panels) if sweep else 1.7 * len(result.rows)
    figure = Figure(figsize=(max(width, 8), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        axis.set_title(title)
        if sweep:
            _draw_rates(axis, rows)
        else:
            _draw_bars(axis, rows, result.unit)
    axes[0].legend()
    facts = result.environment
    figure.suptitle(
        f"{result.case}: {facts['CPU'] if facts['GPU'] == 'none' else facts['GPU']}, torch {facts['torch']}"
    )
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=120))


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of one line of sizes together, titled by what tells them apart from the others."""
    panels: dict[str, list[Row]] = {}
    for row, name in zip(rows, short_names(rows, ignored=("size", "count")), strict=True):
        panels.setdefault(name, []).append(row)
    return panels


def short_names(rows: Sequence[Row], ignored: Sequence[str] = ()) -> list[str]:
    """Each row by the labels in which the rows differ."""
    labels = [{name: value for name, value in row.labels.items() if name not in ignored} for row in rows]
    varying = [name for name in labels[0] if len({each[name] for each in labels}) > 1]
    return [describe({name: each[name] for name in varying}) for each in labels]


def _draw_rates(axis: "Axes", rows: Sequence[Row]) -> None:
    sizes = [int(row.labels["size"]) for row in rows]
    for who in rows[0].seconds:
        rates = [(row.nbytes or 0) * (row.bus_factor or 0) / median(row.seconds[who]) / 1e9 for row in rows]
        axis.plot(sizes, rates, "o-", label=who)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="size (bytes)", ylabel="busbw (GB/s)")
    axis.grid(alpha=0.3)


_FAR = 50  # bars of such a ratio leave nothing to be seen of the others


def _draw_bars(axis: "Axes", rows: Sequence[Row], unit: str) -> None:
    contestants = list(dict.fromkeys(who for row in rows for who in row.seconds))  # not all need be in every row
    units = [median(row.seconds[OURS]) for row in rows]
    width = 0.8 / len(contestants)
    for number, who in enumerate(contestants):
        present = [(index, row.seconds[who], units[index]) for index, row in enumerate(rows) if who in row.seconds]
        indices = [index + number * width for index, _, _ in present]
        ratios = [median(seconds) / one for _, seconds, one in present]
        slow = [p90(seconds) / one - ratio for (_, seconds, one), ratio in zip(present, ratios, strict=True)]
        bars = axis.bar(indices, ratios, width, label=who, yerr=[[0] * len(ratios), slow], capsize=3)
        if who != OURS:
            axis.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios], padding=2)
        if max(ratios) > _FAR:
            axis.set_yscale("log")
    middles = [index + width * (len(contestants) - 1) / 2 for index in range(len(rows))]
    ours = [f"ours {significant(one * PER_SECOND[unit])} {unit}" for one in units]
    names = [f"{name}, {text}" if name else text for name, text in zip(short_names(rows), ours, strict=True)]
    axis.set_xticks(middles, [name.replace(", ", "\n") for name in names])
    axis.set_ylabel("median time / ours, whisker to p90")
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.3)
