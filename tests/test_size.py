"""The size of the code, by numbers that only fall: read from the sources, file by file.

Each number stands in ``size.toml``.  A commit that makes one smaller writes the new one there; a commit that makes one
larger says in the same table, in one line, why.
"""

import ast
import io
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "mgpu_core"
LIMITS = {name: each["most"] for name, each in tomllib.loads((TESTS / "size.toml").read_text()).items()}
SLACK = 60  # lines that a commit may take out without writing the new number down

VAGUE_NAMES = {"each", "found", "made", "own"}  # a tensor is called tensor, a module module
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def files(folder: Path, *without: str) -> list[Path]:
    """Return the sources below a folder, but for some of its folders."""
    return [path for path in sorted(folder.rglob("*.py")) if path.relative_to(folder).parts[0] not in without]


CORE = files(PACKAGE, "tools", "integrations")


def lines_of_code(path: Path) -> int:
    """Return the number of lines without blank ones, comments and docstrings, or other texts that are statements."""
    source = path.read_text()
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def classes() -> Iterator[ast.ClassDef]:
    """Yield the classes of the core."""
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node


def vague_names_of(path: Path) -> int:
    """Return how often variables have names that say nothing, outside of comprehensions on one line."""

    def count(node: ast.AST, *, is_short: bool) -> int:
        is_short |= isinstance(node, COMPREHENSIONS) and node.lineno == node.end_lineno
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        counts = [count(child, is_short=is_short) for child in ast.iter_child_nodes(node)]
        return sum(counts) + (name in VAGUE_NAMES and not is_short)

    return count(ast.parse(path.read_text()), is_short=False)


def arguments_of(class_: ast.ClassDef) -> int:
    """Return how many arguments its ``__init__`` takes."""
    for node in class_.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
    return 0


def attributes_of(class_: ast.ClassDef) -> int:
    """Return how many attributes its methods assign."""
    return len(
        {
            node.attr
            for node in ast.walk(class_)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
    )


def imports_of(path: Path) -> int:
    """Return how many statements import something."""
    return sum(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("lines of the core", CORE),
        ("lines of tools", files(PACKAGE / "tools")),
        ("lines of tests", files(TESTS)),
    ],
)
def test_lines_of_code_only_fall(name: str, paths: list[Path]) -> None:
    found, most = sum(map(lines_of_code, paths)), LIMITS[name]
    assert found <= most, f"{found} {name}: take something out, or say in size.toml why there are more"
    assert found > most - SLACK, f"{found} {name}: write that into size.toml"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("classes of the core", sum(1 for _ in classes())),
        ("arguments of a class", max(map(arguments_of, classes()))),
        ("attributes of a class", max(map(attributes_of, classes()))),
        ("imports of a file", max(map(imports_of, CORE))),
    ],
)
def test_counts_only_fall(name: str, found: int) -> None:
    assert found == LIMITS[name], f"{found} {name}: size.toml says {LIMITS[name]}"


def test_vague_names_only_fall() -> None:
    found: Counter[str] = Counter()
    for path in files(PACKAGE):
        found[path.relative_to(PACKAGE).parts[0]] += vague_names_of(path)
    assert {folder: count for folder, count in found.items() if count} == LIMITS["vague names"]
