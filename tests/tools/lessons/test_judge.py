"""The process that judges: whose files it finds, how it tells failures apart, and what ends it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgpu_core.tools.lessons import find_lesson

pytestmark = pytest.mark.slow

RIGHT = find_lesson(1).solution.read_text()
SCATTER_ROWS = "def scatter_rows(tensor: torch.Tensor, ranks: int, dim: int = 0) -> list[torch.Tensor]:\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def second_line(mgpu, text):
    """What is said of exercise 2 of lesson 1."""
    Path("lesson_01.py").write_text(text)
    status, out, _ = mgpu("check", 1)
    assert status == 1
    return out.splitlines()[1]


def test_a_call_that_fails_is_not_a_useless_result(mgpu):
    line = second_line(mgpu, RIGHT.replace(SCATTER_ROWS, "def scatter_rows(tensor, ranks):\n    dim = 0\n"))
    told = "TypeError: scatter_rows() takes 2 positional arguments but 3 were given"
    assert line == f"exercise 2, scatter_rows: wrong: the call of your function failed: {told}"


def test_a_useless_result_is_told_as_one(mgpu):
    text = RIGHT.replace(SCATTER_ROWS, SCATTER_ROWS + "    return Parts(torch.split(tensor, ranks))\n")
    line = second_line(mgpu, text + "\n\nclass Parts(list):\n    __len__ = None\n")
    told = "TypeError: 'NoneType' object is not callable"
    assert line == f"exercise 2, scatter_rows: wrong: what your function gave back cannot be used: {told}"


def test_answers_may_import_files_beside_them(mgpu):
    """As `python lesson_01.py` lets them; but no such file hides a module that the checker needs."""
    Path("folder").mkdir()
    Path("folder", "helper.py").write_text(RIGHT)
    for name in ("torch", "json", "random"):
        Path("folder", f"{name}.py").write_text("raise SystemExit(f'{__name__} is hidden')\n")
    Path("folder", "mine.py").write_text("import json, random, torch\nfrom helper import *\n")
    status, out, _ = mgpu("check", 1, "folder/mine.py")
    assert (status, out.count(": right\n")) == (0, 3), out


@contextlib.contextmanager
def begun(exercise_2):
    """`mgpu lesson check 1` and its judge, which has come to these lines; in a group of their own, as in a terminal."""
    first = "    import os\n    open('begun', 'w').write(f'{os.getpid()}\\n')\n"
    Path("lesson_01.py").write_text(RIGHT.replace(SCATTER_ROWS, SCATTER_ROWS + first + exercise_2))
    code = "import signal, sys; from mgpu_core.tools.cli import main; "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "  # who runs the tests may have it ignored
    words = [sys.executable, "-P", "-c", code + "sys.exit(main(['lesson', 'check', '1', '--limit', '1000']))"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, start_new_session=True, **pipes) as checking:
        try:
            yield checking, judge_of(checking)
        finally:
            with contextlib.suppress(ProcessLookupError):  # both have ended, unless the test fails
                os.killpg(checking.pid, signal.SIGKILL)


def judge_of(checking):
    """The judge's number, as soon as it has written it."""
    end = time.monotonic() + 200
    while time.monotonic() < end and checking.poll() is None:
        if Path("begun").exists() and Path("begun").read_text().endswith("\n"):
            time.sleep(0.5)  # what it has judged before is on its way through a pipe
            return int(Path("begun").read_text())
        time.sleep(0.05)
    raise AssertionError(f"it has not begun: {checking.poll()}")


def test_ctrl_c_ends_an_endless_loop():
    """The terminal sends it to both processes; one of them tells."""
    with begun("    while True:\n        pass\n") as (checking, judging):
        os.killpg(checking.pid, signal.SIGINT)
        out, err = checking.communicate(timeout=100)
    assert (checking.returncode, out, err) == (130, "exercise 1, chunk_counts: right\n", "interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(judging, 0)


def test_the_judge_minds_no_ctrl_c():
    """Else its traceback stands in the terminal, if it is faster than the process that ends it."""
    with begun("    while not os.path.exists('go'):\n        pass\n") as (checking, judging):
        os.kill(judging, signal.SIGINT)
        Path("go").touch()
        out, err = checking.communicate(timeout=100)
    assert (checking.returncode, out.count(": right\n"), err) == (0, 3, "")
