"""Checks a learner's file in another process, and ends that process when an exercise takes too long."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mgpu_core.tools.lessons.answers import asked_for
from mgpu_core.tools.lessons.catalogue import Lesson
from mgpu_core.tools.lessons.judge import WRONG, Verdict, checks_of

__all__ = ["CannotBeRead", "check_file"]

_START_SECONDS = 300.0  # to import torch, on a machine that is busy


class CannotBeRead(Exception):
    """The learner's file ends with an error when it is imported; the text says where."""


def check_file(lesson: Lesson, path: Path, limit_seconds: float) -> Iterator[Verdict]:
    """Return the verdicts on all exercises, each as soon as it is known.

    Args:
        limit_seconds: that one exercise may take.

    Raises:
        CannotBeRead: the file cannot even be imported.
    """
    names = {number: asked_for(check) for number, check in checks_of(lesson).items()}
    left = list(names)
    while left:
        with _Judge(lesson, path.resolve(), left) as judge:
            judge.start(limit_seconds)
            for number in list(left):
                left.remove(number)
                try:
                    yield Verdict(*judge.next_line(limit_seconds))
                except (_TooLong, _Ended) as error:
                    yield Verdict(number, names[number], WRONG, str(error))
                    break


class _TooLong(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not end within {seconds:g} s: is there an endless loop, or a wait that never ends?")


class _Ended(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"it ended the whole process, with status {status}")


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """SIGINT waits; a process that is started meanwhile never sees one, from its first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Judge:
    """The other process: one line at a time, with a limit."""

    def __init__(self, lesson: Lesson, path: Path, exercises: Sequence[int]) -> None:
        command = [sys.executable, "-P", "-m", "mgpu_core.tools.lessons.judge", str(lesson.number), str(path)]
        command += map(str, exercises)
        with _without_interrupts():  # Ctrl-C goes to both processes; this one ends the other, and tells
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> _Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def start(self, limit_seconds: float) -> None:
        """Wait until the file is imported."""
        self.next_line(_START_SECONDS)
        try:
            failure = self.next_line(limit_seconds)
        except (_TooLong, _Ended) as error:
            raise CannotBeRead(f"importing the file: {error}") from None
        if failure:
            raise CannotBeRead(failure)

    def next_line(self, limit_seconds: float) -> Any:
        """Return its next line."""
        try:
            line = self._lines.get(timeout=limit_seconds)
        except queue.Empty:
            raise _TooLong(limit_seconds) from None
        if line is None:
            raise _Ended(self._process.wait())
        return json.loads(line)
