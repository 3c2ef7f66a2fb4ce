"""Faults of the C++ core, by regular expressions; ``tests/deleted_waits.py`` has what compiles and links them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deleted_waits import CORE, ROOT, Program

_SWAPS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "&&": "||", "||": "&&"}
_SWAPS |= {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/"}
OPERATORS = {  # clang-format puts spaces around binary operators, and around no template's brackets
    "dropped_call": (re.compile(r"^ +(?!return|throw)([\w.]|->|::)+\([^;{}]*\)(?=;$)", re.M), lambda _: "(void)0"),
    "swapped_operator": (re.compile(r"(?<= )(==|!=|<=?|>=?|&&|\|\||[-+*/%])(?= )"), lambda found: _SWAPS[found[0]]),
    "negated_condition": (re.compile(r"(?<=\bif )\((?:[^()\n]|\([^()\n]*\))*\)"), lambda found: f"(!{found[0]})"),
    "number_off_by_one": (re.compile(r"(?<![\w.])\d+(?![\w.])"), lambda found: str(int(found[0]) + 1)),
}
_HIDDEN = re.compile(r'//.*|"(?:[^"\\\n]|\\.)*"|^ *#.*|^template.*', re.M)
_FUNCTION = re.compile(r"^\S.*?(\w+)\(", re.M)


@dataclass(frozen=True)
class CppFault:
    """One change of a source file, from ``begin`` to ``end``; the program must notice it."""

    path: Path
    program: Program
    operator: str
    function: str
    begin: int
    end: int
    changed: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT / 'csrc')} {self.function} {self.operator}"

    @property
    def text(self) -> str:
        source = self.path.read_text()
        return source.splitlines()[source.count("\n", 0, self.begin)].strip()

    def deleted(self) -> str:
        """Return the file's text with the fault, for the machinery of deleted waits."""
        source = self.path.read_text()
        return source[: self.begin] + self.changed + source[self.end :]

    def noticed_by(self) -> str | None:
        """Return the program that fails; empty: it passes, ``None``: the fault does not compile."""
        try:
            return "" if self.program.passes_without(self) else self.program.name
        except subprocess.CalledProcessError:
            return None


def faults_in(path: Path, program: Program) -> Iterator[CppFault]:
    """Yield the faults of a file."""
    source = _HIDDEN.sub(lambda found: " " * len(found[0]), path.read_text())
    for operator, (pattern, change) in OPERATORS.items():
        for found in pattern.finditer(source):
            names = _FUNCTION.findall(source, 0, found.start())
            if names:
                yield CppFault(path, program, operator, names[-1], *found.span(), change(found))


def faults_of(table: dict[str, str], folder: Path) -> list[CppFault]:
    """Return the faults of all files of a table, file by program."""
    programs = {name: Program(name, folder, [CORE]) for name in dict.fromkeys(table.values())}
    return [each for path, name in table.items() for each in faults_in(ROOT / "csrc" / path, programs[name])]
