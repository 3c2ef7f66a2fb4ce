"""Test files that need not run again: nothing that they reach has changed since all of CI has passed on it.

``python ci/proved_tests.py`` prints them, one per line, relative to ``tests/``; ``--write`` notes the digests of all as
they are in ``ci/proved_tests.txt``, after ``bash .ci/run`` has passed: each has passed then, or was proved.

A digest is over the test file and whatever it reaches: what it imports or mentions by its dotted name, also in strings
that it runs, and in turn what that imports; what lies beside it, and is no test itself; the folders that it names; and
what all tests depend on (``ALWAYS``).  The table also has the versions of Python, torch and the ``LIBRARIES`` that were
installed: tests that name one of which there is another now run again.  A file that starts the package's command, or is
in one of ``WHOLE_FOLDERS``, reaches all of the package.  What stands directly in ``tests/`` or in ``tests/docs/`` reads
the whole repository and always runs, and with ``MGPU_CI=full`` everything does.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "ci" / "proved_tests.txt"
PACKAGE, TESTS = ROOT / "mgpu_core", ROOT / "tests"

ALWAYS = (
    *("csrc", "cmake", "build_backend", "CMakeLists.txt", "pyproject.toml", "conftest.py"),
    *("ci/python", "ci/fakes", "ci/common.sh", "ci/proved_tests.py", "tests/fakes", "mgpu_core/__init__.py"),
)
LIBRARIES = (
    *("accelerate", "diffusers", "lightning", "numpy", "peft", "skorch", "timm", "torch_geometric", "torchmetrics"),
    *("torchvision", "transformers"),
)
FOLDERS = ("benchmarks", "docs", "tools")  # at the root, which tests may name
# Folders of tests that use the package through fakes and scripts.
WHOLE_FOLDERS = ("accelerator", "cuda", "ptx", "soak", "processes", "ladder")
PAGES = re.compile(r"\bREADME\b|\bCHANGELOG\b|\.md\b|\.ipynb\b")
WHOLE = re.compile(
    r"""-m["',\s]+mgpu_core\b(?!\.)|import mgpu_core as|getattr\(mgpu_core|mgpu_core\.__\w+__|\.rglob\(|\bmgpu\b["']"""
)
LOADED = re.compile(r"""["'](mgpu_core\.[\w.]+)["']""")  # by name
LOADS = re.compile(r"import_module\([^\"']")  # a name that is computed
DOTTED = re.compile(r"\b(mgpu_core|benchmarks)((?:\.\w+)*)")
IMPORTED = re.compile(r"\bfrom\s+([\w.]+)\s+import\s+(?:\(([^)]*)\)|([^\n;\"']*))|^\s*import\s+([\w.]+)", re.MULTILINE)


@cache
def tracked() -> frozenset[Path]:
    """Return the files of git, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return frozenset(path for name in names if name and (path := ROOT / name).is_file())


@cache
def files_below(*names: str) -> frozenset[Path]:
    """Return all files of these files and folders."""
    folders = [ROOT / name for name in names]
    return frozenset(file for file in tracked() if any(file.is_relative_to(folder) for folder in folders))


@cache
def text_of(file: Path) -> str:
    return file.read_text(errors="replace")


@cache
def digest_of(file: Path) -> bytes:
    return sha256(file.read_bytes()).digest()


@cache
def homes() -> dict[str, str]:
    """Return the module of each public name of the package, which its root loads when it is asked for."""
    for node in ast.walk(ast.parse(text_of(PACKAGE / "__init__.py"))):
        if isinstance(node, ast.Assign | ast.AnnAssign) and "_HOMES" in ast.unparse(node).split("=")[0]:
            table = ast.literal_eval(node.value)  # type: ignore[arg-type]
            return {name: module for module, names in table.items() for name in names}
    raise LookupError("mgpu_core/__init__.py has no table _HOMES")


def module_file(base: Path, parts: Iterable[str]) -> Path | None:
    """Return the file of the longest dotted name below a folder that is a module; ``None``: none is."""
    found = None
    for part in parts:
        base = base / part
        if (file := base.with_suffix(".py")).is_file():
            return file
        if not base.is_dir():
            return found
        if (file := base / "__init__.py").is_file():
            found = file
    return found


def named(dotted: str) -> Iterator[Path]:
    """Yield the file of a dotted name, and the files that its import runs before."""
    first, *parts = dotted.split(".")
    if first == "mgpu_core":
        if parts and parts[0] in homes():
            parts = homes()[parts[0]].split(".")
        base = PACKAGE
    elif first == "benchmarks":
        base = ROOT / "benchmarks"
    else:
        base, parts = TESTS, [first, *parts]
    file = module_file(base, parts)
    if file is not None:
        yield file
        folders = [folder for folder in file.parents if folder.is_relative_to(base) and folder != base]
        yield from (init for folder in folders if (init := folder / "__init__.py").is_file())


def names_in(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; of tests also those in strings, which they may run or exchange."""
    text = text_of(file)
    if file.is_relative_to(TESTS):
        yield from (match[0] for match in DOTTED.finditer(text))
        imports = [
            (alone or module, re.findall(r"\w+", several or one))
            for module, several, one, alone in IMPORTED.findall(text)
        ]
    else:
        nodes = list(ast.walk(ast.parse(text)))
        imports = [
            (node.module or "", [alias.name for alias in node.names])
            for node in nodes
            if isinstance(node, ast.ImportFrom)
        ]
        imports += [(alias.name, []) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        yield from (match[1] for match in LOADED.finditer(text))
    for module, names in imports:
        yield from (module, *(f"{module}.{name}" for name in names))


@cache
def reached_by(file: Path) -> frozenset[Path]:
    """Return the files that one reaches itself."""
    found = {path for name in names_in(file) for path in named(name)}
    beside = files_below(str(file.parent.relative_to(ROOT)))
    if file.is_relative_to(TESTS / "fakes"):  # what they take of the package, their own tests test
        return frozenset(path for path in found if path.is_relative_to(TESTS))
    if file.is_relative_to(TESTS):
        text = text_of(file)
        found |= {path for path in beside if not path.name.startswith("test_")} if file.parent != TESTS else set()
        found |= files_below("docs", *(path.name for path in ROOT.glob("*.md"))) if PAGES.search(text) else set()
        found |= {path for name in FOLDERS if re.search(rf"""["'/]{name}["'/]""", text) for path in files_below(name)}
        is_whole = file.relative_to(TESTS).parts[0] in WHOLE_FOLDERS or WHOLE.search(text)
        return frozenset(found | (files_below("mgpu_core") if is_whole else set()))
    if LOADS.search(text_of(file)) and file.is_relative_to(PACKAGE / "tools"):
        found |= files_below("mgpu_core/tools")
    return frozenset(found | {path for path in beside if path.suffix != ".py" and path.parent == file.parent})


def reached(file: Path) -> set[Path]:
    """Return all files that a test file reaches, with itself."""
    seen, left = set[Path](), [file, *conftests_of(file)]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += reached_by(one) if one.suffix == ".py" and one != PACKAGE / "__init__.py" else []
    return seen | files_below(*ALWAYS)


def conftests_of(file: Path) -> list[Path]:
    return [
        path for folder in file.parents if folder.is_relative_to(TESTS) and (path := folder / "conftest.py").is_file()
    ]


@cache
def version_of(library: str) -> str:
    """Return the installed version without the name of its build; an empty text if there is none."""
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Return the versions of Python, and of torch and the libraries that are installed."""
    found = {name: version_of(name) for name in ("torch", *LIBRARIES)}
    return {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"} | {
        name: number for name, number in found.items() if number
    }


def has_run_with(file: Path, noted: dict[str, str], now: dict[str, str]) -> bool:
    """Return whether a test that was proved with some versions has these now; what is not installed is not used."""
    named = [name for name in LIBRARIES if re.search(rf"\b{name}\b", text_of(file))]
    return all(noted.get(name) == now[name] for name in ("python", "torch", *named) if name in now)


def digests() -> dict[str, str]:
    """Return the digest of each test file in a folder of ``tests/``, by its path there."""
    found = {}
    for file in sorted(set(TESTS.glob("*/**/test_*.py")) - set(TESTS.glob("docs/*"))):
        whole = sha256()
        for one in sorted(reached(file)):
            whole.update(str(one.relative_to(ROOT)).encode() + digest_of(one))
        found[str(file.relative_to(TESTS))] = whole.hexdigest()[:16]
    return found


def main(arguments: list[str]) -> None:
    now, installed = digests(), versions()
    if arguments == ["--write"]:
        lines = [*(f"{name} = {number}" for name, number in installed.items()), *map(" ".join, now.items())]
        TABLE.write_text("".join(f"{line}\n" for line in lines))
    elif os.environ.get("MGPU_CI") != "full":
        lines = TABLE.read_text().splitlines() if TABLE.exists() else []
        noted = dict(line.split(" = ") for line in lines if " = " in line)
        proved = dict(line.split() for line in lines if " = " not in line)
        left_out = [path for path, digest in now.items() if proved.get(path) == digest]
        sys.stdout.writelines(f"{path}\n" for path in left_out if has_run_with(TESTS / path, noted, installed))


if __name__ == "__main__":
    main(sys.argv[1:])
