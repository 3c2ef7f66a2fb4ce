"""Judges the answers of one file, in its own process: `python -m mgpu_core.tools.lessons.judge NUMBER FILE EXERCISES`.

A learner's code may run for ever, or end the process; so this is the process that may be ended (see `check.py`).  Its
stdout has a line of JSON when it is ready, and one per exercise; the learner's own output goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mgpu_core.tools.lessons.answers import Check, WrongAnswer, asked_for, shown
from mgpu_core.tools.lessons.catalogue import Lesson, find_lesson

__all__ = ["NOT_BEGUN", "RIGHT", "WRONG", "Verdict", "checks_of", "judge", "load"]

RIGHT, WRONG, NOT_BEGUN = "right", "wrong", "not begun"


class Verdict(NamedTuple):
    """The verdict on an exercise: `right`, `wrong` and why, or `not begun`."""

    exercise: int
    name: str
    word: str
    reason: str = ""


def checks_of(lesson: Lesson) -> dict[int, Check]:
    """Return the checks of a lesson's exercises, by their numbers."""
    module = importlib.import_module(lesson.checks)
    names = {int(name.removeprefix("exercise_")): name for name in vars(module) if name.startswith("exercise_")}
    return {number: getattr(module, names[number]) for number in sorted(names)}


def load(path: Path) -> ModuleType:
    """Return the learner's file as a module."""
    spec = importlib.util.spec_from_file_location("answers_of_a_learner", path)
    assert spec is not None
    assert spec.loader is not None  # it is a .py file, or made one below
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def judge(number: int, check: Check, answers: ModuleType, path: Path) -> Verdict:
    """Give the learner's function to its check."""
    name = asked_for(check)
    answer = getattr(answers, name, None)
    if answer is None:
        return Verdict(number, name, NOT_BEGUN, f"{path.name} has no function {name}")
    if not callable(answer):
        is_now = f"{shown(answer)}, of type {type(answer).__name__}"
        return Verdict(number, name, WRONG, f"{name} should be a function, and is {is_now}")
    try:
        check(partial(_call, answer))
    except WrongAnswer as error:
        return Verdict(number, name, WRONG, str(error))
    except (Exception, SystemExit) as error:
        is_stub = isinstance(error, NotImplementedError) and _last_line(error) == _line_of(error, path)
        return Verdict(number, name, NOT_BEGUN) if is_stub else Verdict(number, name, WRONG, told(error, path))
    return Verdict(number, name, RIGHT)


def _call(answer: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the learner's function; a failure in its call has this frame, even without one of the learner's file."""
    return answer(*args, **kwargs)


def told(error: BaseException, path: Path) -> str:
    """Return an exception in one line, with the last line of the learner's file in its traceback."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path.name}, line {error.lineno}: {text}"
    line = _line_of(error, path)
    if line is not None:
        return f"{path.name}, line {line.lineno}, {line.line!r}: {text}"
    if any(frame.f_code is _call.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
        return f"the call of your function failed: {text}"
    return f"what your function gave back cannot be used: {text}"


def _line_of(error: BaseException, path: Path) -> traceback.FrameSummary | None:
    lines = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
    return lines[-1] if lines else None


def _last_line(error: BaseException) -> traceback.FrameSummary | None:
    lines = traceback.extract_tb(error.__traceback__)
    return lines[-1] if lines else None


def main(number: int, path: Path, exercises: Iterable[int]) -> None:
    """Write a line when it is ready, one when the file is loaded or cannot be, and one per exercise."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    checks = checks_of(find_lesson(number))
    print(json.dumps("ready"), file=lines)
    sys.path.append(str(path.parent))  # the learner's other files; last, so that none of them hides what we need
    try:
        answers = load(path)
    except (Exception, SystemExit) as error:
        print(json.dumps(told(error, path)), file=lines)
        return
    print(json.dumps(""), file=lines)
    for exercise in exercises:
        print(json.dumps(judge(exercise, checks[exercise], answers, path)), file=lines)
    lines.flush()
    os._exit(0)  # do not wait for threads that the learner left running


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), map(int, sys.argv[3:]))
