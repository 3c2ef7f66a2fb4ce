"""Whether numba's compiler for CUDA works here: its packages come from several hands, and not all of them fit."""

import subprocess
import sys
from functools import cache

import pytest

PROGRAM = """
from types import SimpleNamespace
from numba import types
from numba.cuda import compile_ptx, dispatcher
dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
def kernel(numbers):
    numbers[0] = 1
compile_ptx(kernel, types.void(types.float32[:]), cc=(9, 0))
"""


@cache
def _why_not():
    """The last line of what it says; empty where it compiles the least that there is to compile."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def skip_unless_numba_compiles():
    if reason := _why_not():
        pytest.skip(f"numba compiles nothing for CUDA here: {reason}")
