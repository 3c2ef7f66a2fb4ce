"""Runs a lesson: its blocks from top to bottom, in one namespace, as if the page were a script.

The namespace has one name to begin with: `picture`, the file that the lesson's picture goes to.  Errors show the lines
of the page.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

from mgpu_core.support.extras import require
from mgpu_core.support.files import check_picture, check_writable
from mgpu_core.support.progress import Progress
from mgpu_core.tools.lessons.blocks import Block, blocks_of
from mgpu_core.tools.lessons.catalogue import Lesson
from mgpu_core.tools.user_script import show_error

__all__ = ["run_lesson"]


def run_lesson(lesson: Lesson, picture: Path) -> bool:
    """Run all blocks and print their output; return True if all of it is as on the page.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        OSError: the picture cannot be written.
        ValueError: it is no name of a picture.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")  # the picture goes to a file, on machines without a screen too
    require("matplotlib", "a picture")
    check_picture(picture)
    check_writable(picture)
    blocks = blocks_of(lesson.text)
    print(f"Lesson {lesson.title}")
    with _namespace(lesson, picture) as names, Progress(f"mgpu lesson run {lesson.number}") as progress:
        for number, block in enumerate(blocks, 1):
            print(f"\n[{number}/{len(blocks)}] {block.heading} (line {block.line})")
            print(_dimmed(block.source), flush=True)
            progress((number - 1) / len(blocks), f"block {number} of {len(blocks)}, {block.heading}")
            if not _run_block(lesson, block, names, progress.hide):
                return False
    print(f"\nThe picture is in {picture}.")
    return True


@contextlib.contextmanager
def _namespace(lesson: Lesson, picture: Path) -> Iterator[dict[str, object]]:
    """Return a module of its own, which classes and functions of the page can be found in."""
    module = ModuleType(lesson.file_stem)
    module.__dict__.update(__file__=str(lesson.page), picture=picture)
    before = sys.modules.get(lesson.file_stem)
    sys.modules[lesson.file_stem] = module
    try:
        yield module.__dict__
    finally:
        del sys.modules[lesson.file_stem]
        if before is not None:
            sys.modules[lesson.file_stem] = before


def _dimmed(source: str) -> str:
    """Return the code of a block, set off from its output: indented, and dim on a terminal."""
    begin, end = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
    return "\n".join(f"{begin}    {line}{end}".rstrip() for line in source.strip().splitlines())


def _run_block(lesson: Lesson, block: Block, names: dict[str, object], before_output: Callable[[], object]) -> bool:
    printed = _Both(sys.stdout, before_output)
    try:
        code = compile("\n" * (block.line - 1) + block.source, str(lesson.page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
    except BrokenPipeError:  # the reader has left, as in `mgpu lesson run 8 | head -1`: no failure of the page
        raise
    except Exception as error:
        before_output()
        show_error(error, lesson.page)
        return False
    before_output()
    if block.expected is None or printed.getvalue() == block.expected:
        return True
    print(f"line {block.line}: the block printed something else than the page says:")
    print("\n".join(_difference(block.expected.splitlines(), printed.getvalue().splitlines())))
    return False


def _difference(expected: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    return difflib.unified_diff(expected, printed, "on the page", "printed", lineterm="")


class _Both(io.StringIO):
    """Keep written text, and pass it on, after a call."""

    def __init__(self, stream: TextIO, before: Callable[[], object]) -> None:
        super().__init__()
        self._stream, self._before = stream, before

    def write(self, text: str) -> int:
        self._before()
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()
