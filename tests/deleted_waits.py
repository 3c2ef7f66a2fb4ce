"""Deletes each wait of the core and of the nccl backend in turn, and proves that the deferred device notices.

    python tests/deleted_waits.py [--only WORD]

A wait is a call that orders streams or keeps memory alive.  For each one, its file is compiled without it, linked with
the others and run as ``tests/cpp/test_deferred.cpp`` or ``test_nccl_deferred.cpp``: the program must fail.  About two
minutes on two cores; needs g++.  Exit status 1 if a deleted wait goes unnoticed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "csrc" / "core"
CPU = ROOT / "csrc" / "backends" / "cpu"
NCCL = ROOT / "csrc" / "backends" / "nccl"
FAKES = ROOT / "tests" / "fakes"
PROGRAMS = ROOT / "tests" / "cpp"
FLAGS = ["-std=gnu++17", "-O1", "-fPIC", "-Wno-psabi", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]
SECONDS = 120

# A call of one of these as a statement; their definitions name types between the parentheses.
CALL = re.compile(
    r"(?<![\w:.])(?:ops_?\.(?:wait|keep|synchronize)|order|barrier|all_before|before_all|before_leaders|"
    r"after_leaders)\((?![A-Z]\w+&? |const )"
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


def waits(folder: Path) -> Iterator[Wait]:
    """All that there are in a folder's files."""
    for path in sorted(folder.glob("*.cpp")):
        source = path.read_text()
        for found in CALL.finditer(source):
            end = _closing(source, source.index("(", found.start())) + 1
            if source[end] == ";":
                line = source.count("\n", 0, found.start()) + 1
                yield Wait(path, line, found.start(), end, " ".join(source[found.start() : end].split()))


def _closing(source: str, opening: int) -> int:
    depth = 0
    for position in range(opening, len(source)):
        depth += {"(": 1, ")": -1}.get(source[position], 0)
        if depth == 0:
            return position
    raise ValueError("parentheses do not match")


@dataclass
class Program:
    """A test program, built file by file, so that one file can be exchanged."""

    name: str
    folder: Path
    backends: list[Path]  # folders whose waits it tests, the last of them its own
    fake_nccl: bool = False
    objects: dict[Path, Path] = field(default_factory=dict)
    libraries: list[str] = field(default_factory=list)

    def build(self) -> None:
        levels = ["reduce", "gather_rows", "elementwise", "optimizers"]
        jobs = [(path, []) for backend in self.backends for path in sorted(backend.glob("*.cpp"))]
        jobs += [(CPU / f"{name}.cpp", ["-DMGPU_LEVEL=baseline"]) for name in levels]
        jobs += [(CPU / f"{name}.cpp", []) for name in ("device_ops", "kernels", "thread_pool")]
        jobs += [(FAKES / "deferred" / "deferred_device.cpp", []), (PROGRAMS / f"{self.name}.cpp", self._fake_nccl())]
        with ThreadPoolExecutor(2) as pool:
            self.objects = dict(pool.map(lambda job: (job[0], self.compile(*job)), jobs))

    def _fake_nccl(self) -> list[str]:
        if not self.fake_nccl:
            return []
        library = self.folder / "libnccl.so.2"
        sources = [path for path in sorted((FAKES / "nccl").glob("*.cpp")) if path.stem != "half_nccl"]
        subprocess.run(["g++", *FLAGS, "-shared", *map(str, sources), "-o", str(library)], check=True)
        self.libraries = [str(library), f"-Wl,-rpath,{self.folder}", "-ldl"]
        return [f'-DFAKE_NCCL="{library}"', f"-I{PROGRAMS}"]

    def compile(self, path: Path, extra: list[str]) -> Path:
        made = self.folder / f"{self.name}-{path.parent.name}-{path.stem}.o"
        subprocess.run(["g++", *FLAGS, *extra, "-c", str(path), "-o", str(made)], check=True)
        return made

    def passes(self, name: str, exchanged: dict[Path, Path]) -> bool:
        program = self.folder / name
        objects = {**self.objects, **exchanged}.values()
        subprocess.run(["g++", "-pthread", *map(str, objects), *self.libraries, "-o", str(program)], check=True)
        try:
            return subprocess.run([program], capture_output=True, timeout=SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def passes_without(self, wait: Wait) -> bool:
        mutant = self.folder / f"{self.name}-{wait.path.stem}-{wait.begin}.cpp"
        mutant.write_text(wait.deleted())
        return self.passes(mutant.stem, {wait.path: self.compile(mutant, [])})


def unnoticed(program: Program, only: str) -> tuple[int, int]:
    """How many of the waits that the program is for go unnoticed, and how many there are."""
    program.build()
    if not program.passes(f"{program.name}-whole", {}):
        raise SystemExit(f"{program.name} fails with all waits in place")
    wanted = [wait for wait in waits(program.backends[-1]) if only in wait.name]
    with ThreadPoolExecutor(2) as pool:
        passed = list(pool.map(program.passes_without, wanted))
    for wait, missed in zip(wanted, passed, strict=True):
        print(("UNNOTICED  " if missed else "noticed    ") + wait.name)
    return sum(passed), len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only waits whose name contains it")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = [
            Program("test_deferred", folder, [CORE]),
            Program("test_nccl_deferred", folder, [CORE, NCCL], fake_nccl=True),
        ]
        results = [unnoticed(program, only) for program in programs]
    missed, count = (sum(column) for column in zip(*results, strict=True))
    print(f"{count - missed} of {count} deleted waits are noticed")
    return int(missed > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
