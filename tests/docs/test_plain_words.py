"""Docstrings of the package: how they open, and how often they use words that hide who does what."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mgpu_core

PACKAGE = Path(mgpu_core.__file__).parent
BANNED_OPENINGS = {"What", "Of", "Whose", "Whether", "Who", "Where", "Those", "Equal", "Nobody", "Which", "They", "Up"}
DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (file and name, definition, docstring) for everything in the package that has one."""
    for path in sorted(set(PACKAGE.rglob("*.py")) - set(PACKAGE.glob("tools/lessons/pages/**/*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DEFINITIONS) else None
            if text:
                yield f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', '')}", node, text


def per_10_000(pattern: str) -> float:
    texts = [text for _, _, text in docstrings()]
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
    return sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts) / words * 10_000


def test_functions_open_with_a_verb():
    found = [
        (name, text.splitlines()[0])
        for name, node, text in docstrings()
        if isinstance(node, ast.FunctionDef) and text.split()[0].strip("`:,") in BANNED_OPENINGS
    ]
    assert found == []


def test_what_is_rare():
    assert per_10_000(r"\bwhat\b") <= 10


def test_place_is_rare():
    """Indices, devices and addresses have names of their own; torch's *in place* stays."""
    assert per_10_000(r"(?<!\bin )(?<!\bin-)\bplaces?\b") <= 5
