"""The end of a child process is judged by its line and its status, whatever a C library prints beside it."""

import os
import subprocess
import sys

import pytest
from fakes.children import finish

pytestmark = pytest.mark.processes

C_PRINTS = "import ctypes\nctypes.CDLL(None).printf(b'NCCL version 2.30.7+cuda13.2\\n')\n"


def start(program, unbuffered):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    variables |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    command = [sys.executable, "-I", "-c", program] if not unbuffered else [sys.executable, "-u", "-c", program]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_c_library_may_print_after_the_line(unbuffered):
    finish(start(C_PRINTS + "print('right')", unbuffered), 20)


@pytest.mark.parametrize("program", ["print('right')\nraise SystemExit(1)", "print('not right')", ""])
def test_a_child_that_fails_is_seen(program):
    with pytest.raises(AssertionError):
        finish(start(program, False), 20)
