"""Pictures of results: rates over sizes where there are several sizes, otherwise bars of ratios.

Only ratios can be compared between rows and runs, so a bar is a contestant's median over ours, and our own time is a
number below it. Where a peer takes far longer, a bar is our share of its time, in percent.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_core.support.extras import require
from mgpu_core.support.files import write_whole
from mgpu_core.support.tables import human_nbytes
from mgpu_core.tools.bench.case import Label, Row, show_label, varying
from mgpu_core.tools.bench.timing import OURS, PER_SECOND, median, p90, significant
from mgpu_core.tools.bench.titles import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mgpu_core.tools.bench.result import Result


def draw(result: "Result", path: Path) -> None:
    """Write a PNG. `ModuleNotFoundError` with the cure if matplotlib is missing."""
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
    machine = facts["CPU"] if facts["GPU"] == "none" else facts["GPU"]
    figure.suptitle(f"{TITLES.get(result.case, result.case)}: {machine}, torch {facts['torch']}", fontsize=10)
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=120))


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Yield the rows of one line of sizes together, titled by what tells them apart from the others."""
    panels: dict[str, list[Row]] = {}
    for row, name in zip(rows, short_names(rows, ignored=("size", "count")), strict=True):
        panels.setdefault(name, []).append(row)
    return panels


def short_names(rows: Sequence[Row], ignored: Sequence[str] = ()) -> list[str]:
    """Return for each row the labels in which the rows differ; a number needs its name, a word does not."""
    names = [name for name in varying([row.labels for row in rows]) if name not in ignored]
    return [", ".join(_short_label(name, row.labels[name]) for name in names) for row in rows]


def _short_label(name: str, value: Label) -> str:
    return value if isinstance(value, str) else f"{name} {show_label(name, value)}"


def _draw_rates(axis: "Axes", rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    sizes = [int(row.labels["size"]) for row in rows]
    for who in rows[0].seconds:
        rates = [(row.nbytes or 0) * (row.bus_factor or 0) / median(row.seconds[who]) / 1e9 for row in rows]
        (line,) = axis.plot(sizes, rates, "o-", label=rows[0].title_of(who))
        hollow = [(size, rate) for size, rate, row in zip(sizes, rates, rows, strict=True) if row.busy]
        axis.plot(*zip(*hollow, strict=True) if hollow else ([], []), "o", color=line.get_color(), mfc="white")
    axis.set_xscale("log", base=2)
    shown = sizes[:: 1 + len(sizes) // 6]
    axis.set_xticks(shown, [human_nbytes(size) for size in shown])
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set(xlabel="size", ylabel="bus bandwidth, GB/s")
    axis.grid(alpha=0.3)


_FAR = 50  # next to bars of such a ratio the others cannot be seen


def _draw_bars(axis: "Axes", rows: Sequence[Row], unit: str) -> None:
    if max(ratio for row in rows for ratio in row.ratios().values()) > _FAR:
        _draw_percent(axis, rows)
    else:
        _draw_ratios(axis, rows)
    ours = [f"ours {significant(median(row.seconds[OURS]) * PER_SECOND[unit])} {unit}" for row in rows]
    busy = ["busy machine" if row.busy else "" for row in rows]
    names = [filter(None, parts) for parts in zip(short_names(rows), ours, busy, strict=True)]
    axis.set_xticks(range(len(rows)), [", ".join(parts).replace(", ", "\n") for parts in names])
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.3)


def _draw_ratios(axis: "Axes", rows: Sequence[Row]) -> None:
    contestants = list(dict.fromkeys(who for row in rows for who in row.seconds))  # not all need be in every row
    units = [median(row.seconds[OURS]) for row in rows]
    width = 0.8 / len(contestants)
    for number, who in enumerate(contestants):
        present = [(index, row.seconds[who], units[index]) for index, row in enumerate(rows) if who in row.seconds]
        indices = [index + (number - (len(contestants) - 1) / 2) * width for index, _, _ in present]
        ratios = [median(seconds) / one for _, seconds, one in present]
        slow = [p90(seconds) / one - ratio for (_, seconds, one), ratio in zip(present, ratios, strict=True)]
        bars = axis.bar(indices, ratios, width, label=rows[0].title_of(who))
        axis.errorbar(indices, ratios, [[0.0] * len(ratios), slow], fmt="none", ecolor="grey", capsize=3)
        if who != OURS:  # at the end of the bar, in front of the whisker
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
            axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, bbox=box)
    axis.set_ylabel("times as slow as ours (whisker: p90)")


def _draw_percent(axis: "Axes", rows: Sequence[Row]) -> None:
    """Draw our time as a share of each peer's."""
    peers = list(dict.fromkeys(who for row in rows for who in row.ratios()))
    for who in peers:
        shares = {index: 100 / row.ratios()[who] for index, row in enumerate(rows) if who in row.ratios()}
        bars = axis.bar(list(shares), list(shares.values()), 0.5, label=f"ours / {who}")
        axis.bar_label(bars, [f"{share:.3g} %" for share in shares.values()], padding=2)
    axis.axhline(100, color="grey", linestyle="--", linewidth=1)
    axis.set_ylabel("our time, % of the peer's")
