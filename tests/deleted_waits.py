"""Deletes each wait of the core, the nccl backend and the package's Python in turn, and proves that tests notice.

    python tests/deleted_waits.py [--only WORD]

A wait is a call that orders streams or keeps memory alive.  For each one of C++, its file is compiled without it,
linked with the others and run as ``tests/cpp/test_deferred.cpp`` or ``test_nccl_deferred.cpp``: the program must fail.
For each one of the files of :data:`PYTHON`, a copy of the package without it must fail a test on the fake accelerator.
About five minutes on two cores; needs g++.  Exit status 1 if a deleted wait goes unnoticed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mgpu_core

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(mgpu_core.__file__).parent
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


_PIPELINES, _PREDICTOR = "accelerator/test_pipelines.py", "accelerator/test_predictor.py"
PYTHON = {  # files of the package, with the tests that notice
    "devices/transfer.py": (_PIPELINES, "accelerator/test_device_loader.py", _PREDICTOR),
    "inference/engine.py": (_PREDICTOR,),
    "pipeline/parameter_copies.py": (_PIPELINES,),
    "pipeline/visits.py": (_PIPELINES,),
}
PYTHON_WAITS = {"wait_stream", "wait_event", "record_stream", "synchronize", "hand_over", "used_here", "lend"}


def python_waits(file: str) -> Iterator[ast.Expr]:
    """All that there are in a file of the package: statements that are a call of one of these."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if getattr(called, "attr", getattr(called, "id", "")) in PYTHON_WAITS:
                yield node


def passes_without(folder: Path, file: str, wait: ast.Expr) -> bool:
    """Whether the tests pass with a copy of the package in this folder that has no such wait."""
    path = folder / "mgpu_core" / file
    source = path.read_text().splitlines()
    last = wait.end_lineno or wait.lineno
    without = [" " * wait.col_offset + "pass", *[""] * (last - wait.lineno)]
    path.write_text("\n".join([*source[: wait.lineno - 1], *without, *source[last:]]) + "\n")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *PYTHON[file]]
    environment = os.environ | {"PYTHONPATH": str(folder), "MGPU_TEST_FAKE": "1", "MGPU_CORE_TIMEOUT": "20"}
    try:
        done = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, timeout=SECONDS)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text("\n".join(source) + "\n")


def unnoticed_in_python(folder: Path, only: str) -> tuple[int, int]:
    """How many of the waits of the package's files go unnoticed, and how many there are."""
    shutil.copytree(PACKAGE, folder / "mgpu_core", ignore=shutil.ignore_patterns("__pycache__"))
    missed = count = 0
    for file in PYTHON:
        for wait in python_waits(file):
            name = f"{file}:{wait.lineno}: {ast.unparse(wait)}"
            if only in name:
                is_missed = passes_without(folder, file, wait)
                print(("UNNOTICED  " if is_missed else "noticed    ") + name, flush=True)
                missed, count = missed + is_missed, count + 1
    return missed, count


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
        results.append(unnoticed_in_python(folder / "python", only))
    missed, count = (sum(column) for column in zip(*results, strict=True))
    print(f"{count - missed} of {count} deleted waits are noticed")
    return int(missed > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
