"""Results for people: a table on the terminal, and one page with tables and pictures per machine.

`run.py report` makes `results/<machine>/README.md` and the PNG files beside it from nothing but the JSON files there.
The tables are Markdown padded to columns, so one text serves the terminal and the file.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.case import Row, UsageError, Verdict
from benchmarks.environment import header
from benchmarks.plot import draw
from benchmarks.result import Result
from benchmarks.timing import OURS, PER_SECOND, median, p90, significant
from mgpu_core.files import write_whole

RESULTS = Path(__file__).parent / "results"


def render(result: Result) -> str:
    """Table, formula and bounds."""
    parts = [table(result)]
    if result.formula:
        parts.append(result.formula)
    if result.verdicts:
        parts.append("\n".join(bound_line(verdict) for verdict in result.verdicts))
    return "\n\n".join(parts)


def table(result: Result) -> str:
    """One line per row and contestant; `peer/ours` is the ratio of medians: above 1, we are faster."""
    names = list(result.rows[0].labels)
    titles = [*names, "who", f"time({result.unit})", "p90", *_rate_titles(result.rows[0]), "#wrong", "peer/ours"]
    lines = [_cells(row, who, PER_SECOND[result.unit]) for row in result.rows for who in row.seconds]
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
    # Words to the left, numbers to the right; the first line tells which is which.
    words = [not cell[:1].isdigit() for cell in lines[0]]
    rule = ["-" * width if word else "-" * (width - 1) + ":" for width, word in zip(widths, words, strict=True)]
    padded = [
        [
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(line, widths, words, strict=True)
        ]
        for line in (titles, rule, *lines)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def bound_line(verdict: Verdict) -> str:
    """`* held: ranks 2, ...: gloo / ours >= 6 (7.2)`."""
    state = {True: "held", False: "MISSED", None: "not measured"}[verdict.held]
    value = "" if verdict.value is None else f" ({verdict.value:.2f})"
    return f"* {state}: {verdict.text}{value}"


def report_machine(folder: Path) -> Path:
    """Draws the page and the pictures of one machine; returns the page.

    Raises:
        UsageError: no results in the folder, or a file that is not one.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UsageError(f"{folder}: no JSON files to report")
    sections = []
    for path in files:
        result = Result.read(path)
        draw(result, path.with_suffix(".png"))
        sections.append(_section(result, path.stem))
    page = folder / "README.md"
    text = "\n\n".join([f"# {folder.name}", *sections]) + "\n"
    write_whole(page, lambda stream: stream.write(text.encode()))
    return page


def _section(result: Result, stem: str) -> str:
    title = f"## {stem}\n\n{result.summary}"
    return "\n\n".join([title, render(result), f"![{stem}]({stem}.png)", header(result.environment)])


def _rate_titles(row: Row) -> Sequence[str]:
    if row.nbytes is None:
        return ()
    return ("GB/s",) if row.bus_factor is None else ("algbw", "busbw")


def _cells(row: Row, who: str, scale: float) -> list[str]:
    middle = median(row.seconds[who])
    cells = [str(value) for value in row.labels.values()]
    cells += [who, significant(middle * scale), significant(p90(row.seconds[who]) * scale)]
    if row.nbytes is not None:
        factors = (1.0,) if row.bus_factor is None else (1.0, row.bus_factor)
        cells += [f"{row.nbytes / middle / 1e9 * factor:.2f}" for factor in factors]
    # A row with a wrong value is never timed, so a row that is here has none.
    return [*cells, "0", f"{1 if who == OURS else row.ratios()[who]:.2f}"]
