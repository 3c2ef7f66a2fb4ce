"""Every check of every checker can fail: some wrong answer trips it.

A check is a line that raises `WrongAnswer`, or one that calls `expect` or a function of the checker that has checks.
One that nothing trips is dead, or nobody knows that it works: it wants one more wrong answer in
`wrong_answers`, or to be removed.
"""

import ast
import importlib
import sys
import traceback
from pathlib import Path

import pytest

from mgpu_core.lessons import find_lessons
from mgpu_core.lessons.answers import WrongAnswer, asked_for
from mgpu_core.lessons.judge import checks_of, load

WRONG_ANSWERS = Path(__file__).parent / "wrong_answers"
CHECKS = "mgpu_core.lessons.checks."


def files_of(lesson):
    """The checker, and what it takes from the modules beside it."""
    names = {getattr(each, "__module__", "") for each in vars(importlib.import_module(lesson.checks)).values()}
    return sorted(sys.modules[name].__file__ for name in names if str(name).startswith(CHECKS))


def called(node):
    """The name of the function, if the node is the call of one by its name."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def lines_of_checks(text):
    """The line of each check in a checker."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    checking = {"WrongAnswer", "expect", "expect_raises"}
    while (
        more := {each.name for each in functions if any(called(node) in checking for node in ast.walk(each))} - checking
    ):
        checking |= more
    return {node.lineno for node in ast.walk(tree) if called(node) in checking}


def lines_tripped(lesson):
    """(file, line) of each check that rejects a wrong answer, and of those that called it."""
    found = set()
    for path in sorted(WRONG_ANSWERS.glob(f"{lesson.page.stem}_*.py")):
        answers = load(path)
        for check in checks_of(lesson).values():
            if answer := getattr(answers, asked_for(check), None):
                try:
                    check(answer)
                except WrongAnswer as error:
                    found.update((each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__))
    return found


@pytest.mark.parametrize("lesson", find_lessons(), ids=lambda lesson: lesson.page.stem)
def test_every_check_is_tripped_by_a_wrong_answer(lesson):
    tripped = lines_tripped(lesson)
    checks = {(file, line) for file in files_of(lesson) for line in lines_of_checks(Path(file).read_text())}
    assert len(checks) >= len(checks_of(lesson))
    dead = [f"{Path(file).name}, line {line}" for file, line in sorted(checks - tripped)]
    assert not dead, f"no wrong answer trips: {dead}"


def test_checks_are_found_in_all_forms():
    text = """
def deep(x):
    if x:
        raise WrongAnswer("x")

def shallow(x):
    deep(x)

def harmless(x):
    return x

@asks_for("f")
def exercise_1(answer):
    expect("f(1)", answer(1), harmless(1))
    shallow(
        harmless(2),
    )

class Wire:
    def send(self):
        def work():
            raise WrongAnswer("y") from None
        return work
"""
    assert lines_of_checks(text) == {4, 7, 14, 15, 22}
