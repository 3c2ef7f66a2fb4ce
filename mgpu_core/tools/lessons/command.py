"""`mgpu lesson`: list the lessons, show one, run it, start its exercises, check the answers, show the solution."""

import argparse
import os
import re
import sys
from pathlib import Path

from mgpu_core.support.files import write_whole
from mgpu_core.tools.cpu_ranks import on_cpu_ranks
from mgpu_core.tools.lessons.catalogue import Lesson, find_lesson, find_lessons
from mgpu_core.tools.lessons.check import CannotBeRead, check_file
from mgpu_core.tools.lessons.judge import RIGHT, Verdict
from mgpu_core.tools.lessons.runner import run_lesson

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Run the action; return the exit status."""
    if args.word == "list":
        return _list()
    lesson = find_lesson(args.number)
    if args.word in ("show", "solution"):
        print(
            _without_tags(lesson.text) if args.word == "show" else lesson.solution.read_text(encoding="utf-8"), end=""
        )
        return 0
    if args.word == "start":
        return _start(lesson)
    with on_cpu_ranks(args.ranks, hide=True):
        if args.word == "run":
            return 0 if run_lesson(lesson, args.picture or Path(f"{lesson.file_stem}.png")) else 1
        return _check(lesson, args.file or Path(f"{lesson.file_stem}.py"), args.limit)


def _list() -> int:
    for lesson in find_lessons():
        print(lesson.title)
    print("\nmgpu lesson run 1 runs the first, mgpu lesson start 1 gives you its exercises.")
    return 0


def _without_tags(page: str) -> str:
    """Return a page for the terminal, where nothing can be folded: a summary becomes a line of text."""
    return re.sub(r"^</?details>\n", "", re.sub(r"<summary>(.*)</summary>", r"\1:", page), flags=re.MULTILINE)


def _start(lesson: Lesson) -> int:
    path = Path(f"{lesson.file_stem}.py")
    if os.path.lexists(path):  # a link that leads nowhere, too
        raise FileExistsError(f"{path} is there already, and is not overwritten")
    write_whole(path, lambda file: file.write(lesson.stub.read_bytes()))
    print(f"{path} has the exercises. Write the functions, then: mgpu lesson check {lesson.number}")
    return 0


def _check(lesson: Lesson, path: Path, limit_seconds: float) -> int:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file with answers")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `mgpu lesson start {lesson.number}` writes the exercises")
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a Python file, whose name ends in .py")
    verdicts = []
    try:
        for verdict in check_file(lesson, path, limit_seconds):
            print(_line(verdict), flush=True)
            verdicts.append(verdict.word)
    except CannotBeRead as error:
        print(f"{path} cannot be checked: {error}")
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    right = verdicts.count(RIGHT)
    more = "" if right == len(verdicts) else f"; mgpu lesson show {lesson.number} says what they should do"
    print(f"{right} of {len(verdicts)} right{more}")
    return 0 if right == len(verdicts) else 1


def _line(verdict: Verdict) -> str:
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"exercise {verdict.exercise}, {verdict.name}: {verdict.word}{reason}"
