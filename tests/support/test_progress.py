"""Signs of life: lines now and then without a terminal, one live line on it, and an estimate of what is left."""

import os
import pty
import subprocess
import sys

import pytest

from mgpu_core.support.progress import Progress, silent, within


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def test_lines_are_five_seconds_apart_and_have_an_estimate(capsys, clock):
    with Progress("mgpu x", clock) as report:
        for seconds in range(13):
            clock.seconds = 100.0 + seconds
            report(seconds / 20, f"step {seconds}")
    assert capsys.readouterr() == (
        "",
        "mgpu x: step 5, about 15 s left\nmgpu x: step 10, about 10 s left\n",
    )


@pytest.mark.parametrize(
    ("share", "line"),
    [(0.0, "mgpu x: go\n"), (0.01, "mgpu x: go, about 16 min left\n"), (1.0, "mgpu x: go\n")],
)
def test_no_estimate_without_a_step_that_is_done(capsys, clock, share, line):
    with Progress("mgpu x", clock) as report:
        clock.seconds += 10
        report(share, "go")
        report.hide()
    assert capsys.readouterr().err == line


def test_a_short_run_says_nothing(capsys, clock):
    with Progress("mgpu x", clock) as report:
        clock.seconds += 4.9
        report(0.5, "half")
    assert capsys.readouterr() == ("", "")


def test_a_part_of_the_work():
    told = []
    within(lambda *each: told.append(each), 1, 4)(0.5, "x")
    assert told == [(0.375, "x")]
    assert silent(0.5, "x") is None


def test_a_live_line_on_a_terminal():
    code = "from mgpu_core.support.progress import Progress\n"
    code += "with Progress('mgpu x', lambda: 0.0) as report:\n"  # however long the process takes
    code += "    report(0.25, 'row [1] of 4'); report.hide(); print('out', flush=True)"
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, b"out\n")
    assert "mgpu x: row [1] of 4, about 0 s left" in shown
    assert shown.endswith("\x1b[2K")  # the line is gone
