"""A user's script, run in this process as ``python script.py`` would."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["as_script", "become_script", "run_script", "show_error"]


def become_script(script: Path, arguments: Sequence[str]) -> None:
    """``sys.argv`` and ``sys.path`` as ``python script.py`` has them."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))


@contextmanager
def as_script(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """The same for as long as it lasts."""
    before = sys.argv, list(sys.path)
    become_script(script, arguments)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def run_script(script: Path, name: str) -> dict[str, Any]:
    """Its globals.

    They are those of a module ``name`` that stays: what the script leaves for the end of the process, threads and
    ``atexit``, may need them, and what it pickles is looked for there.

    Raises:
        BaseException: whatever the script does.
    """
    path = os.path.abspath(script)  # as python sets it: the script may go to another folder
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = path
    exec(compile(script.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return vars(module)


def show_error(error: BaseException, script: Path) -> None:
    """As python would: without the frames of who ran the script, whom its author does not know."""
    path = os.path.abspath(script)
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename != path:
        here = here.tb_next
    traceback.print_exception(type(error), error, here)
