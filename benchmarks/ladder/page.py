"""The ladder's tables: on the terminal, and in the README between two markers, from nothing but stored results.

A figure of a GPU is there only if a GPU gave it: with no `ladder.json` in any folder of `benchmarks/results`, the
README says that none has.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.ladder.measure import COPY, contestant_of
from benchmarks.ladder.rungs import CHANGED, KERNELS, LANGUAGES, RUNGS
from mgpu_core.tools.bench.case import Row, UsageError
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.timing import OURS, median, p90, significant

README = Path(__file__).parent / "README.md"
FILE = "ladder.json"
BEGIN, END = "<!-- ladder-table -->\n", "<!-- /ladder-table -->\n"
NO_FIGURES = "No GPU has run the ladder yet, so there are no figures.\n"
TITLES = ("rung", "language", "time (us)", "p90", "GB/s", "of peak", "moved", "what changed")
WORDS = (0, 1, 7)
FORMULA = (
    "GB/s = the bytes that the work needs (each input read once, each output written once) / median time, "
    "1 GB = 10^9 bytes; moved: how many times as many the rung reads and writes"
)
SIZE_OF = {"pack": "in 64 tensors", "sum_ranks": "of each of 4 ranks", "gather_rows": "of normalised batch"}


def table(row: Row) -> str:
    """One kernel's ladder, rung by rung, then the shipped kernel and the copy."""
    lines = []
    for rung in RUNGS:
        for language in LANGUAGES:
            if (who := contestant_of(rung, language)) in row.seconds:
                moved = "1.00" if rung == RUNGS[-1] else str(row.labels["moved"])
                lines.append(_line(row, who, rung, language, moved, CHANGED[str(row.labels["kernel"])][rung]))
    lines.append(_line(row, OURS, "shipped", "cuda", "1.00", "mgpu_core.kernels, of the same tensors"))
    lines.append(_line(row, COPY, COPY, "torch", "1.00", "as many bytes: the floor"))
    return _aligned(lines)


def render(result: Result) -> str:
    """All tables of a run, each under its kernel's name, and what the numbers are."""
    parts = [f"### {row.labels['kernel']}, {_size(row)}\n\n{table(row)}" for row in result.rows]
    return "\n\n".join([*parts, f"{FORMULA}; {_peak(result.rows[0])}."])


def readme(results: Path) -> str:
    """What stands between the markers.

    Raises:
        UsageError: a file that is not a result of the ladder.
    """
    return "\n".join(_section(Result.read(path)) for path in sorted(results.glob(f"*/{FILE}"))) or NO_FIGURES


def filled(text: str, tables: str) -> str:
    """The text with the tables between its markers.

    Raises:
        UsageError: the markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"{README.name}: wanted one {BEGIN.strip()} and behind it one {END.strip()}")
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + tables + END + rest.partition(END)[2]


def _section(result: Result) -> str:
    if any(row.labels.get("kernel") not in KERNELS for row in result.rows):
        raise UsageError(f"{FILE}: {result.case} is not the ladder's")
    facts = result.environment
    about = ", ".join(f"{name} {facts[name]}" for name in ("driver", "torch", "CUDA", "commit") if name in facts)
    return f"**{facts['GPU']}**; {about}\n\n{render(result)}\n"


def _size(row: Row) -> str:
    return f"{int(row.labels['size']) / (1 << 20):g} MiB {SIZE_OF[str(row.labels['kernel'])]}"


def _peak(row: Row) -> str:
    if not row.labels["peak"]:
        return "peak: what the copy reached, because the device does not say its memory's clock"
    return f"peak: {row.labels['peak']} GB/s, the memory's clock x 2 x the width of its bus"


def _rate(row: Row, who: str) -> float:
    return (row.nbytes or 0) / median(row.seconds[who]) / 1e9


def _line(row: Row, who: str, rung: str, language: str, moved: str, what: str) -> tuple[str, ...]:
    seconds = row.seconds[who]
    share = _rate(row, who) / (int(row.labels["peak"]) or _rate(row, COPY))
    times = significant(median(seconds) * 1e6), significant(p90(seconds) * 1e6)
    return (rung, language, *times, f"{_rate(row, who):.0f}", f"{share:.0%}", moved, what)


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table padded to columns, which also reads well on a terminal."""
    widths = [max(map(len, column)) for column in zip(TITLES, *lines, strict=True)]
    rule = tuple("-" * width if position in WORDS else "-" * (width - 1) + ":" for position, width in enumerate(widths))
    padded = (
        " | ".join(
            cell.ljust(width) if position in WORDS else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (TITLES, rule, *lines)
    )
    return "\n".join(f"| {line} |" for line in padded)
