"""Results for people: a table on the terminal, and one page with tables and pictures per machine.

`benchmarks/run.py report` makes `results/<machine>/README.md` and the PNG files next to it from the JSON files there,
and from the summary in `notes.toml`. The tables are Markdown padded to columns, so one text serves the terminal and the
file.
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from mgpu_core.support.files import write_whole
from mgpu_core.support.tables import Lines, Table, human_nbytes
from mgpu_core.tools.bench.case import Labels, Row, Ruling, UsageError, describe, show_label, varying
from mgpu_core.tools.bench.environment import header
from mgpu_core.tools.bench.plot import draw
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import OURS, PER_SECOND, median, p90, significant
from mgpu_core.tools.bench.titles import TITLES

NOTES = "notes.toml"
LONG = 12  # rows; longer tables are folded
BUSY = "`*`: other programs kept processors busy, so the row is not judged by `--check` and `--baseline`"
LEGEND = (
    "`peer/ours` is the peer's median time over ours: at 2.00, ours takes half the time. "
    "p90: nine of ten times are not longer. Every result was verified before it was timed."
)


def lines_of(result: Result) -> Lines:
    """Return the labels that all rows share, the table, its formula and its bounds, with empty lines between them."""
    return [each for part in _parts(result, table(result)) for each in (part, "")][:-1]


def _parts(result: Result, rows: str | Table) -> Lines:
    bounds = "\n".join(bound_line(verdict) for verdict in result.verdicts)
    shared = in_all_rows([each.labels for row in result.rows for each in row.of_each_algorithm()])
    return [part for part in (shared, rows, _notes_on(result.rows), result.formula, bounds) if part]


def _notes_on(rows: Sequence[Row]) -> str:
    """Return the peers that were left out, and what the mark of a row means."""
    without = dict.fromkeys(f"without {peer}: {reason}" for row in rows for peer, reason in row.without.items())
    return "\n".join([*without, *[BUSY] * any(row.busy for row in rows)])


def in_all_rows(labels: Sequence[Labels]) -> str:
    """Return the labels that are the same everywhere, as a line; empty: there are none."""
    several = varying(labels)
    shared = describe({name: value for name, value in labels[0].items() if name not in several})
    return f"In all rows: {shared}" if shared else ""


def table(result: Result) -> Table:
    """Return a line per row and contestant; `peer/ours` is the ratio of medians: above 1, ours is faster."""
    names = varying([row.labels for row in result.rows])
    titles = [*names, "who", f"time ({result.unit})", "p90", *_rate_titles(result.rows[0]), "peer/ours"]
    lines = [_cells(row, names, who, PER_SECOND[result.unit]) for row in result.rows for who in row.seconds]
    # The first line tells which columns hold words.
    words = [index for index, cell in enumerate(lines[0]) if not cell[:1].isdigit()]
    return Table([titles, *lines], words, markdown=True)


def bound_line(verdict: Ruling) -> str:
    """Return `* held: ranks 2, size 64 MiB: gloo / ours >= 6 (7.2)`."""
    state = "not judged: busy" if verdict.busy else {True: "held", False: "MISSED", None: "not measured"}[verdict.held]
    value = "" if verdict.value is None else f" ({significant(verdict.value)})"
    text = re.sub(r"\bsize (\d+)", lambda match: f"size {human_nbytes(int(match[1]))}", verdict.text)
    return f"* {state}: {text}{value}"


def report_machine(folder: Path) -> Path:
    """Draw the page and the pictures of one machine; return the page.

    Raises:
        UsageError: no results in the folder, or a file that is not one.
    """
    results = {path: Result.read(path) for path in folder.glob("*.json")}
    if not results:
        raise UsageError(f"{folder}: no JSON files to report")
    order = [*TITLES]
    ordered = sorted(results, key=lambda path: (order.index(path.stem) if path.stem in order else len(order), path))
    for path in ordered:
        draw(results[path], path.with_suffix(".png"))
    everywhere = _in_all([result.environment for result in results.values()])
    sections = [_section(results[path], path.stem, everywhere) for path in ordered]
    page = folder / "README.md"
    text = "\n\n".join([f"# {folder.name}", *_notes(folder), header(everywhere), LEGEND, *sections]) + "\n"
    write_whole(page, lambda stream: stream.write(text.encode()))
    return page


def compare(results: Sequence[Result]) -> Lines:
    """Return a table per case: a line for each row of each result, with the machine in front."""
    by_case: dict[str, list[Result]] = {}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    return [each for name, found in by_case.items() for each in _compared(name, found)][:-1]


def _compared(case: str, results: Sequence[Result]) -> Lines:
    rows = [(result, row) for result in results for row in result.rows]
    peers = list(dict.fromkeys(peer for _, row in rows for peer in row.ratios()))
    labels = [row.labels for _, row in rows]
    several = varying(labels)
    lines = [["machine", *several, f"ours ({results[0].unit})", *(f"{peer}/ours" for peer in peers)]]
    for result, row in rows:
        label_cells = [show_label(name, row.labels[name]) if name in row.labels else "" for name in several]
        ours = significant(median(row.seconds[OURS]) * PER_SECOND[result.unit]) + " *" * row.busy
        ratios = [f"{row.ratios()[peer]:.2f}" if peer in row.seconds else "" for peer in peers]
        lines.append([_machine(result), *label_cells, ours, *ratios])
    notes = _notes_on([row for _, row in rows])
    parts: Lines = [f"### {TITLES.get(case, case)}", in_all_rows(labels), Table(lines, markdown=True), notes]
    return [each for part in parts if part != "" for each in (part, "")]


def _machine(result: Result) -> str:
    facts = result.environment
    return f"{facts['CPU'] if facts['GPU'] == 'none' else facts['GPU']}; torch {facts['torch']}"


def _notes(folder: Path) -> list[str]:
    """Return the summary that a person wrote in `notes.toml`, if there is one."""
    notes = folder / NOTES
    return [tomllib.loads(notes.read_text())["summary"].strip()] if notes.exists() else []


def _in_all(environments: Sequence[dict[str, str]]) -> dict[str, str]:
    first, *others = environments
    return {name: fact for name, fact in first.items() if all(each.get(name) == fact for each in others)}


def _section(result: Result, stem: str, everywhere: dict[str, str]) -> str:
    whole = table(result)
    rows, count = str(whole), len(whole.rows) - 1
    if count > LONG:
        rows = f"<details>\n<summary>{count} rows</summary>\n\n{rows}\n\n</details>"
    facts = {name: fact for name, fact in result.environment.items() if name not in everywhere}
    parts = [f"## {TITLES.get(stem, stem)}", f"`{stem}`: {result.summary}", *map(str, _parts(result, rows))]
    return "\n\n".join(filter(None, [*parts, f"![{stem}]({stem}.png)", header(facts)]))


def _rate_titles(row: Row) -> Sequence[str]:
    if row.nbytes is None:
        return ()
    return ("GB/s",) if row.bus_factor is None else ("algbw", "busbw")


def _cells(row: Row, names: Sequence[str], who: str, scale: float) -> list[str]:
    middle = median(row.seconds[who])
    cells = [*(show_label(name, row.labels[name]) for name in names), row.title_of(who)]
    cells[0] += " *" * row.busy
    cells += [significant(middle * scale), significant(p90(row.seconds[who]) * scale)]
    if row.nbytes is not None:
        factors = (1.0,) if row.bus_factor is None else (1.0, row.bus_factor)
        cells += [f"{row.nbytes / middle / 1e9 * factor:.2f}" for factor in factors]
    return [*cells, f"{1 if who == OURS else row.ratios()[who]:.2f}"]
