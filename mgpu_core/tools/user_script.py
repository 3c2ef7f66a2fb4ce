"""A user's script, run in this process as ``python script.py`` would."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = [
    "Program",
    "as_script",
    "exit_status",
    "note_order",
    "run_script",
    "script_status",
    "show_error",
    "top_level_names",
    "uses_torchs_wrapper",
]


def become_script(script: Path, arguments: Sequence[str]) -> None:
    """Set ``sys.argv`` and ``sys.path`` as ``python script.py`` does."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))


@contextmanager
def as_script(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set the process up as :func:`become_script` does, for the length of the context."""
    before = sys.argv, list(sys.path)
    become_script(script, arguments)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


@dataclass(frozen=True, slots=True)
class Program:
    """What ``python script.py`` or ``python -m package`` runs.

    Attributes:
        path: of the source.
        spec: of a module that is run by its name; ``None``: a script.
    """

    path: Path
    spec: ModuleSpec | None = None

    @classmethod
    def of_module(cls, name: str) -> Program:
        """Return the module of a name, or the ``__main__`` of a package; the current folder is looked in first.

        Raises:
            ValueError: there is no such module, or it has no source.
        """
        sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except ImportError as error:
            raise ValueError(f"-m {name}: {error}") from error
        finally:
            del sys.path[0]
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ValueError(f"-m {name}: there is no such module, or no __main__ in this package")
        return cls(Path(spec.origin), spec)


def run_script(script: Path, name: str, spec: ModuleSpec | None = None) -> dict[str, Any]:
    """Run a script and return its globals.

    They are those of a module ``name`` that stays: threads and ``atexit`` functions of the script may need them, and
    pickle looks its classes up there.

    Raises:
        BaseException: whatever the script does.
    """
    path = os.path.abspath(script)  # as python sets it: the script may go to another folder
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = path
    if spec is not None:
        module.__spec__, module.__package__ = spec, spec.parent
    exec(compile(script.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return vars(module)


def show_error(error: BaseException, script: Path) -> None:
    """Print the error as python does, without the frames of the runner, which the script's author does not know."""
    path = os.path.abspath(script)
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename != path:
        here = here.tb_next
    traceback.print_exception(type(error), error, here)


def note_order(command: str, ours: Collection[str], arguments: Sequence[str]) -> None:
    """Note options of ours after the script's name, where they are the script's arguments."""
    for word in arguments:
        if word.partition("=")[0] in ours:
            print(f"{command}: note: {word} comes after the script, so it is passed to the script", file=sys.stderr)


def script_status(script: Path, arguments: Sequence[str], spec: ModuleSpec | None = None) -> int:
    """Run the script as the main program and return its exit status; its error is shown.

    ``sys.argv`` and ``sys.path`` stay set: its threads may live to the end of the process.
    """
    try:
        become_script(script, arguments)
        if spec is not None:
            sys.path[0] = os.getcwd()
        run_script(script, "__main__", spec)
    except SystemExit as end:
        return exit_status(end.code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        show_error(error, script)
        return 1
    return 0


def exit_status(code: object) -> int:
    """Return the exit status of a ``SystemExit``'s code; a text is printed, as python does."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


_BY_OTHER_MEANS = {"exec", "globals", "locals", "setattr", "vars"}
_TORCHS_WRAPPERS = {
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.data_parallel",
    "torch.nn.parallel.data_parallel.DataParallel",
}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def top_level_names(script: Path) -> set[str] | None:
    """Return the names that the script's source defines at its top level, outside of ``__name__ == "__main__"``.

    ``None``: the source does not tell, because it cannot be parsed, imports ``*`` or sets names by other means.
    """
    tree = _parsed(script)
    if tree is None:
        return None
    names: set[str] = set()
    for node in ast.walk(tree):  # what functions do to the module
        if isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, ast.Name) and node.id in _BY_OTHER_MEANS:
            return None
    open_: list[ast.AST] = list(tree.body)
    for node in open_:
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            open_ += node.orelse
        else:
            names.update(_stored(node))
            open_ += ast.iter_child_nodes(node)
    return None if "*" in names else names


def _stored(node: ast.AST) -> list[str]:
    """Return the names that this node itself sets."""
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).split(".")[0]]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def uses_torchs_wrapper(script: Path) -> bool:
    """Return whether the script's source names ``torch.nn.DataParallel`` or its function."""
    tree = _parsed(script)
    if tree is None:
        return False
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update({each.asname: each.name for each in node.names if each.asname})
        elif isinstance(node, ast.ImportFrom):
            known.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, *rest = ast.unparse(node).split(".")
            if ".".join([known.get(first, first), *rest]) in _TORCHS_WRAPPERS:
                return True
    return False


def _parsed(script: Path) -> ast.Module | None:
    try:
        return ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return None
