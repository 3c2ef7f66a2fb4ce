"""Puts faults into the solution of a lesson, one at a time, and asks the checks of the lesson for their verdicts."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import ModuleType

from faults.operators import Fault, faults_of
from mgpu_core.tools.lessons import Lesson
from mgpu_core.tools.lessons.answers import asked_for
from mgpu_core.tools.lessons.judge import WRONG, checks_of, judge

START_SECONDS = 100.0  # of a process, on a machine that is busy
SECONDS = 30.0  # of one fault: many times what the slowest one takes


def faults_in(lesson: Lesson) -> list[Fault]:
    """Return the faults of a lesson's solution."""
    return list(faults_of(ast.parse(lesson.solution.read_text())))


def function_of(fault: Fault) -> str:
    """Return the solution's function that a fault is in, which may be in a function inside that one."""
    return fault.function.partition(".")[0]


def words_on(lesson: Lesson) -> Iterator[str]:
    """Yield the word of the verdict on each fault; one that hangs is wrong, as `mgpu lesson check` tells a learner."""
    done, count = 0, len(faults_in(lesson))
    while done < count:
        with _judging_from(lesson, done) as verdicts:
            hangs = False
            while done < count and not hangs:
                hangs = not verdicts.poll(SECONDS)
                yield WRONG if hangs else verdicts.recv()
                done += 1


@contextlib.contextmanager
def _judging_from(lesson: Lesson, first: int) -> Iterator[Connection]:
    """Run a process that sends its words; it is forked from one that has imported torch."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "faults.lessons"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_judge_from, args=(lesson, first, sender))
    process.start()
    sender.close()  # so that nothing more comes where the process ends
    try:
        assert receiver.poll(START_SECONDS)
        receiver.recv()
        yield receiver
    finally:
        process.kill()
        process.join()
        receiver.close()


def _judge_from(lesson: Lesson, first: int, sender: Connection) -> None:
    """Send a word when it begins, and one on each fault from the first one on."""
    sender.send("ready")
    checks = {asked_for(check): (number, check) for number, check in checks_of(lesson).items()}
    for number, fault in enumerate(faults_in(lesson)[first:], first):
        verdict = judge(*checks[function_of(fault)], _answers_with(lesson, number), lesson.solution)
        sender.send(verdict.word)
    os._exit(0)  # do not wait for threads that a fault left running


def _answers_with(lesson: Lesson, number: int) -> ModuleType:
    """Return the solution with the fault of this number."""
    tree = ast.parse(lesson.solution.read_text())
    next(islice(faults_of(tree), number, None)).put()
    answers = ModuleType(lesson.file_stem)
    exec(compile(ast.fix_missing_locations(tree), str(lesson.solution), "exec"), vars(answers))
    return answers
