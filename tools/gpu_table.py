"""Writes the table of GPU figures in docs/gpu.md from benchmarks/results/<machine>/*.json; `--check` only compares.

Every number is of one run on one GPU: the bandwidth reached, the share of what a plain copy of as many bytes reached in
the same run, and how many times as long each peer took. Only the kernels are in it, and only rows of a GPU: a
folder of a machine without one gives no table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed mgpu_core comes before the sources beside us

from mgpu_core.tools.bench.case import Row  # noqa: E402
from mgpu_core.tools.bench.result import Result  # noqa: E402
from mgpu_core.tools.bench.timing import OURS, median, significant  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- gpu-table -->\n", "<!-- /gpu-table -->\n"
NO_FIGURES = "Not yet measured on a GPU.\n"
HEAD = "| kernel | time (us) | GB/s | of a copy's | times as long as ours |\n|---|--:|--:|--:|---|\n"


class NoPlace(Exception):
    """The page has no marker for the table, or more than one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done or up to date, 1 stale, 2 a page without the markers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    options = parser.parse_args(arguments)
    before = PAGE.read_text()
    try:
        after = filled(before, tables(RESULTS))
    except NoPlace as error:
        print(f"gpu_table.py: error: {error}", file=sys.stderr)
        return 2
    if not options.check:
        PAGE.write_text(after)
    elif after != before:
        print("gpu_table.py: docs/gpu.md is stale: run `python tools/gpu_table.py`", file=sys.stderr)
        return 1
    return 0


def filled(text: str, table: str) -> str:
    """The text with the table between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise NoPlace(f"{PAGE.name}: wanted one {BEGIN.strip()} and behind it one {END.strip()}")
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + table + END + rest.partition(END)[2]


def tables(results: Path) -> str:
    """One table per machine with a GPU, or the sentence that there is none."""
    machines = [_table(_measured(folder)) for folder in sorted(results.iterdir()) if folder.is_dir()]
    return "\n".join(table for table in machines if table) or NO_FIGURES


def _measured(folder: Path) -> list[tuple[Result, list[Row]]]:
    """The kernels' results with rows of a GPU, and these rows."""
    read = [Result.read(path) for path in sorted(folder.glob("*.json"))]
    found = [(result, [row for row in result.rows if _is_kernel(row.labels)]) for result in read]
    return [(result, rows) for result, rows in found if rows]


def _is_kernel(labels: Mapping[str, object]) -> bool:
    return labels.get("device") == "cuda" and "clock" in labels and "size" in labels


def _table(measured: Sequence[tuple[Result, list[Row]]]) -> str:
    if not measured:
        return ""
    # Files of several days may stand side by side: every commit is named.
    facts = measured[0][0].environment
    commits = ", ".join(sorted({result.environment.get("commit", "unknown") for result, _ in measured}))
    versions = f"driver {facts['driver']}, torch {facts['torch']}, CUDA {facts['CUDA']}, commit {commits}"
    lines = [_line(result.case, row) for result, rows in measured for row in rows]
    verdicts = [verdict for result, _ in measured for verdict in result.verdicts]
    held = [verdict for verdict in verdicts if verdict.held]
    missed = "".join(
        f"* missed: {verdict.text} ({verdict.value:.2f})\n" for verdict in verdicts if verdict.held is False
    )
    bounds = f"{len(held)} of {len(verdicts)} bounds held.\n" + (f"\n{missed}" if missed else "")
    return f"{facts['GPU']}; {versions}:\n\n{HEAD}{''.join(lines)}\n{bounds}"


def _line(case: str, row: Row) -> str:
    seconds = median(row.seconds[OURS])
    ratios = row.ratios()
    # A small file may have been made with other peers: then there is no copy to compare with.
    share = f"{ratios.pop('copy'):.2f}" if "copy" in ratios else ""
    peers = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in ratios.items())
    rate = "" if row.nbytes is None else f"{row.nbytes / seconds / 1e9:.0f}"
    return f"| `{case}`, {_of(row)} | {significant(seconds * 1e6)} | {rate} | {share} | {peers} |\n"


def _of(row: Row) -> str:
    """`256 MiB in 64 tensors`; a time that holds the host's work too says so."""
    mib, tensors = int(row.labels["size"]) / (1 << 20), int(row.labels["tensors"])
    text = f"{mib:.0f} MiB" + (f" in {tensors:,} tensors" if tensors > 1 else "")
    return text if row.labels["clock"] == "device" else f"{text}, with the host's time"


if __name__ == "__main__":
    sys.exit(main())
