"""Puts faults that are derived from the syntax into the sources, one at a time, and proves that the tests notice.

    python tests/faults [--only WORD] [--sample N --seed S] [--list] [--survivors FILE]

``targets.toml`` says which files, and which tests must notice.  These run without a fault first, and must pass.  A
hang counts as noticed.  Exit status 1 if a fault goes unnoticed that is not known to change nothing.
"""

from __future__ import annotations

import argparse
import ast
import random
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from faults import cpp
from faults.operators import faults_of
from faults.run import TESTS, failing_test

ROOT = TESTS.parent
PACKAGE = "mgpu_core"


@dataclass(frozen=True)
class PythonFault:
    """A fault of the package, by its number in ``faults_of``."""

    module: str
    number: int
    name: str
    text: str
    tests: tuple[str, ...]

    def noticed_by(self) -> str:
        """Return the first test that fails; empty: none does."""
        return failing_test(f"{PACKAGE}.{self.module}:{self.number}", self.tests)


Fault: TypeAlias = PythonFault | cpp.CppFault


def python_faults(tables: dict[str, dict[str, list[str]]]) -> list[PythonFault]:
    """Return the faults of all modules of the table: those that run without a GPU."""
    found, on_gpus = [], tables["on_gpus"]
    for module, own in tables["python"].items():
        tests = dict.fromkeys([*own, *tables["then"][module.partition(".")[0]]])
        source = (ROOT / PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        lines = source.splitlines()
        for number, each in enumerate(faults_of(ast.parse(source))):
            if each.function not in on_gpus.get(module, ()):
                name, text = f"{module} {each.function} {each.operator}", lines[each.line - 1].strip()
                found.append(PythonFault(module, number, name, text, tuple(tests)))
    return found


def what_fails_without(chosen: Sequence[Fault], pool: ThreadPoolExecutor) -> list[str]:
    """Return the tests that fail without any fault."""
    tests = sorted({test for each in chosen if isinstance(each, PythonFault) for test in each.tests})
    programs = {each.program.name: each.program for each in chosen if isinstance(each, cpp.CppFault)}
    failed = [name for name, each in programs.items() if each.build() or not each.passes(f"{name}-whole", {})]
    return failed + list(filter(None, pool.map(lambda test: failing_test("", [test]), tests)))


def report(count: int, total: int, missed: Sequence[Fault], equivalent: dict[str, str]) -> str:
    """Return the page of the survivors of ``count`` faults, out of ``total`` that there are."""
    real = [f"* `{each.name}`: `{each.text}`" for each in missed if each.name not in equivalent]
    same = [f"* `{each.name}`: `{each.text}`; {equivalent[each.name]}" for each in missed if each.name in equivalent]
    noticed, count = count - len(missed), count - len(same)
    lines = [
        "# Faults put in on purpose\n",
        "Written by `python tests/faults --survivors FILE`: faults are derived from the syntax of the sources, put in",
        "one at a time, and the tests named in `tests/faults/targets.toml` must fail.\n",
        f"There are {total}.  {noticed} of {count} were noticed ({100 * noticed / max(count, 1):.1f} %).\n",
    ]
    lines += ["## Unnoticed\n", *(real or ["none"]), "\n## Unnoticed, because they change nothing that can be seen\n"]
    return "\n".join([*lines, *(same or ["none"]), ""])


def run(chosen: Sequence[Fault], equivalent: dict[str, str], workers: int) -> tuple[int, list[Fault]]:
    """Run the tests with each of the faults; return how many of them compile, and the survivors."""
    began, count, missed = time.monotonic(), 0, []
    with ThreadPoolExecutor(workers) as pool:
        if failed := what_fails_without(chosen, pool):
            raise SystemExit(f"without any fault these fail: {failed}")
        results = pool.map(lambda each: each.noticed_by(), chosen)
        for each, noticed in zip(chosen, results, strict=True):
            if noticed is None:
                continue
            word = "noticed" if noticed else "equivalent" if each.name in equivalent else "UNNOTICED"
            print(f"{word:10} {each.name}: {each.text} -- {noticed}", flush=True)
            count += 1
            missed += [] if noticed else [each]
    print(f"{count - len(missed)} of {count} faults noticed in {time.monotonic() - began:.0f} s")
    return count, missed


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only faults with this in their name")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="faults that are tested at a time")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--survivors", type=Path, metavar="FILE", help="write the page of those that go unnoticed")
    options = parser.parse_args()
    tables = tomllib.loads((TESTS / "faults" / "targets.toml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        found = [*python_faults(tables), *cpp.faults_of(tables["cpp"], Path(folder))]
        chosen: list[Fault] = [each for each in found if options.only in each.name]
        if options.sample is not None:
            chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
        if options.list:
            print(*(f"{each.name}: {each.text}" for each in chosen), f"{len(chosen)} faults", sep="\n")
            return 0
        count, missed = run(chosen, tables["equivalent"], options.workers)
        if options.survivors:
            options.survivors.write_text(report(count, len(found), missed, tables["equivalent"]))
        return int(not count or any(each.name not in tables["equivalent"] for each in missed))
