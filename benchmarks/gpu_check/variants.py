"""Times the variants of the kernels on a GPU, all in one process: `python variants.py [OUT.json] [--rounds N]`.

The program is the kit's (`prepare.sh` has built it), from `benchmarks/ladder/variants`. Each variant must make the bits
of the first of its kind; then a table for each kernel: microseconds, GB/s, and the speed as a part of a copy's of as
many bytes. OUT.json gets the numbers. Exit status: 0; 1 other bits, or a program that failed; 2 no program.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

KIT = Path(os.environ.get("GPU_CHECK_KIT") or Path(__file__).resolve().parents[2] / ".gpu_check")
PROGRAM = KIT / "cpp" / "kernel_variants"

Row = dict[str, str | float]


def rows_of(lines: Iterable[str]) -> tuple[list[Row], list[str]]:
    """Return the measurements of the program's lines, and its other lines."""
    rows, others = [], []
    for line in lines:
        if line.startswith("{"):
            rows.append(json.loads(line))
        else:
            others.append(line)
    return rows, others


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table for each kernel and size."""
    for (kernel, what), group in groupby(rows, lambda row: (row["kernel"], row["what"])):
        yield f"\n{kernel}, {what}\n\n| variant | us | p90 | GB/s | of a copy |\n|---|--:|--:|--:|--:|"
        for row in group:
            yield f"| {row['variant']} | {row['us']} | {row['p90']} | {row['GBps']} | {row['of_copy']} |"


def figures(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each kernel and size: how fast what ships is, beside a copy and beside what it was."""
    for (kernel, what), group in groupby(rows, lambda row: (row["kernel"], row["what"])):
        of = {str(row["variant"]).partition(":")[0]: row for row in group}
        was, ships = of["before"], of["shipped"]
        faster = float(was["us"]) / float(ships["us"])
        yield f"figure: {kernel}, {what}: us {ships['us']}  of_copy {ships['of_copy']}  times_before {faster:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and measures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--program", type=Path, default=PROGRAM)
    options = parser.parse_args(arguments)
    if not options.program.exists():
        print(f"variants.py: no {options.program}: run benchmarks/gpu_check/prepare.sh", file=sys.stderr)
        return 2
    done = subprocess.run([options.program, str(options.rounds)], stdout=subprocess.PIPE, text=True)
    rows, others = rows_of(done.stdout.splitlines())
    print("\n".join([*tables(rows), "", *figures(rows), *others]))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
