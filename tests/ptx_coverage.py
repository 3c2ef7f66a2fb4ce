"""Prints which PTX instructions of the CUDA kernels ran in tests, and why the others did not.

    MGPU_TEST_PTX=75 MGPU_TEST_PTX_COVERAGE=/tmp/coverage build/test/tests/cpp/test_cuda_kernel_edges
    python tests/ptx_coverage.py /tmp/coverage.75.*

Each process that ran kernels left a file; an instruction counts if it ran in one of them.  The files are of one
architecture.  Exit status 1 if fewer than
95 percent of the instructions ran that can run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LEAST = 0.95

# Why instructions of a kernel cannot run: (kernel, source line, reason), the first two as regular expressions.
REASONS = [
    ("prepare_adam", r"optimizers\.cuh", "special cases of pow, for bases and exponents that no optimizer has"),
    ("gather_rows", r"gather_rows\.cuh:(0|15)$", "a 64-bit division, by more tiles of a row than a grid has blocks"),
    ("move_kernel", r"launch_plan\.h", "steps of common_head that two dtypes of one size never take"),
    (
        "sum_many",
        r"sum_ranks\.cuh|elements\.cuh:\d\d$|cuda_(bf|fp)16",
        "the unrolled loop's end for 4 and 8 ranks, which have code of their own",
    ),
]


@dataclass
class Kernel:
    """What ran of one kernel."""

    total: int
    never: dict[int, tuple[str, str]] = field(default_factory=dict)  # line of the PTX: line of the source, instruction


def read(path: Path) -> dict[str, Kernel]:
    """Read the coverage that one process wrote."""
    kernels: dict[str, Kernel] = {}
    name = ""
    for row in path.read_text().splitlines():
        if row.startswith("\t"):
            line, source, text = row[1:].split("\t", 2)
            kernels[name].never[int(line)] = source, text
        else:
            name, _, total = row.split()
            kernels[name] = Kernel(int(total))
    return kernels


def merge(all_kernels: Iterable[dict[str, Kernel]]) -> dict[str, Kernel]:
    """Return what ran in none of several processes."""
    merged: dict[str, Kernel] = {}
    for kernels in all_kernels:
        for name, kernel in kernels.items():
            if name in merged:
                never = merged[name].never
                merged[name].never = {line: never[line] for line in never.keys() & kernel.never.keys()}
            else:
                merged[name] = kernel
    return merged


def reason_of(kernel: str, source: str) -> str | None:
    """Return why an instruction of a source line need not run, or ``None``."""
    for part, file, reason in REASONS:
        if re.search(part, kernel) and re.search(file, source):
            return reason
    return None


def family(kernel: str) -> str:
    """Return the name of a kernel without its template arguments."""
    found = re.search(r"cuda\d+([a-z0-9_]*?_kernel)", kernel)
    return found[1] if found else kernel


def report(kernels: dict[str, Kernel]) -> tuple[str, float]:
    """Return the page, and which part ran of what can run."""
    total, missed, excused = Counter[str](), Counter[str](), Counter[str]()
    reasons, unexplained = Counter[str](), Counter[str]()
    for name, kernel in kernels.items():
        total[family(name)] += kernel.total
        for source, _ in kernel.never.values():
            if reason := reason_of(name, source):
                excused[family(name)] += 1
                reasons[f"{family(name)}: {reason}"] += 1
            else:
                missed[family(name)] += 1
                unexplained[f"{family(name)} {source}"] += 1
    rows = [f"{'kernel':22} {'instructions':>12} {'ran':>8} {'cannot':>8} {'missed':>8}"]
    for name in total:
        ran = total[name] - missed[name] - excused[name]
        rows.append(f"{name:22} {total[name]:12} {ran:8} {excused[name]:8} {missed[name]:8}")
    possible = total.total() - excused.total()
    part = 1 - missed.total() / possible if possible else 0.0
    rows.append(f"{part:.2%} of the {possible} instructions that can run have run, of {total.total()} in all")
    rows += ["", "Never ran, with a reason:", *(f"{count:8} {text}" for text, count in reasons.most_common())]
    rows += ["", "Never ran:", *(f"{count:8} {text}" for text, count in unexplained.most_common(40))]
    return "\n".join(rows), part


def main(paths: Sequence[str]) -> int:
    """Print the report; return the exit status."""
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    page, part = report(merge(read(Path(path)) for path in paths))
    print(page)
    return 0 if part >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
