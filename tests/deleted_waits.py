"""Deletes each wait of the core in turn, and proves that the deferred device notices.

    python tests/deleted_waits.py [--only WORD]

A wait is a call that orders streams or keeps memory alive.  For each one, its file is compiled without it, linked with
the others and run as ``tests/cpp/test_deferred.cpp``: the program must fail.  About three minutes on two cores; needs
g++.  Exit status 1 if a deleted wait goes unnoticed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "csrc" / "core"
FLAGS = ["-std=gnu++17", "-O1", "-Wno-psabi", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]
SECONDS = 120

# A call of one of these, where it is a statement: its definition and its declaration are not.
CALL = re.compile(
    r"(?<![\w:])(?:(?:ops_?|mirrors)\.(?:wait|keep|synchronize)|order|barrier|all_before|before_all)\((?:ops|on|each|reader|"
    r"to|rank|distinct|\{)"
)


@dataclass(frozen=True)
class Wait:
    """One call, from ``begin`` to ``end`` of the file's text."""

    path: Path
    line: int
    begin: int
    end: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.line}: {self.text}"

    def deleted(self) -> str:
        """The file's text without it."""
        source = self.path.read_text()
        return source[: self.begin] + "(void)0" + source[self.end :]


def waits() -> Iterator[Wait]:
    """All that there are, file by file."""
    for path in sorted(CORE.glob("*.cpp")):
        source = path.read_text()
        for found in CALL.finditer(source):
            end = _closing(source, source.index("(", found.start())) + 1
            if source[end] == ";":
                line = source.count("\n", 0, found.start()) + 1
                yield Wait(path, line, found.start(), end, " ".join(source[found.start() : end].split()))


def _closing(source: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(source)):
        depth += {"(": 1, ")": -1}.get(source[place], 0)
        if depth == 0:
            return place
    raise ValueError("parentheses do not match")


class Program:
    """test_deferred, built file by file, so that one file can be exchanged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        levels = ["reduce", "gather_rows", "elementwise", "optimizers"]
        cpu = ROOT / "csrc" / "backends" / "cpu"
        jobs = [(path, []) for path in sorted(CORE.glob("*.cpp"))]
        jobs += [(cpu / f"{name}.cpp", ["-DMGPU_LEVEL=baseline"]) for name in levels]
        jobs += [(cpu / f"{name}.cpp", []) for name in ("device_ops", "kernels", "thread_pool")]
        jobs += [(ROOT / "tests" / "fakes" / "deferred" / "deferred_device.cpp", [])]
        jobs += [(ROOT / "tests" / "cpp" / "test_deferred.cpp", [])]
        with ThreadPoolExecutor(2) as pool:
            self.objects = dict(pool.map(lambda job: (job[0], self.compile(job[0], *job)), jobs))

    def compile(self, owner: Path, path: Path, extra: list[str]) -> Path:
        made = self.folder / f"{owner.parent.name}-{path.stem}.o"
        subprocess.run(["g++", *FLAGS, *extra, "-c", str(path), "-o", str(made)], check=True)
        return made

    def passes(self, name: str, exchanged: dict[Path, Path]) -> bool:
        program = self.folder / name
        objects = {**self.objects, **exchanged}
        subprocess.run(["g++", "-pthread", *map(str, objects.values()), "-o", str(program)], check=True)
        try:
            return subprocess.run([program], capture_output=True, timeout=SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def passes_without(self, number: int, wait: Wait) -> bool:
        mutant = self.folder / f"mutant{number}.cpp"
        mutant.write_text(wait.deleted())
        return self.passes(f"program{number}", {wait.path: self.compile(mutant, mutant, [])})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only waits whose name contains it")
    wanted = [wait for wait in waits() if parser.parse_args().only in wait.name]
    with tempfile.TemporaryDirectory() as folder:
        program = Program(Path(folder))
        if not program.passes("whole", {}):
            print("the program fails with all waits in place", file=sys.stderr)
            return 1
        with ThreadPoolExecutor(2) as pool:
            passed = list(pool.map(program.passes_without, range(len(wanted)), wanted))
    for wait, unnoticed in zip(wanted, passed, strict=True):
        print(("UNNOTICED  " if unnoticed else "noticed    ") + wait.name)
    print(f"{len(wanted) - sum(passed)} of {len(wanted)} deleted waits are noticed")
    return int(any(passed) or not wanted)


if __name__ == "__main__":
    sys.exit(main())
