"""The ladder's CUDA C++ from nvcc's PTX, on the PTX machine: a fault of a rung fails its test."""

import re
import subprocess
from functools import cache

from fakes import ptx

from benchmarks.ladder.cuda_library import KERNELS
from benchmarks.ladder.cupy_rungs import THREADS

ARCHITECTURE = 75


@cache
def machine(kernel):
    """Return the machine with all rungs of a kernel, and their symbols by C++ names (``pack_naive<float, float>``)."""
    made = ptx.Machine(ptx.compile_ptx(KERNELS / f"{kernel}.cu", ARCHITECTURE))
    made.allow_unknown_memory()
    return made, {_plain(symbol): symbol for symbol in made.kernels()}


def run(kernel, name, blocks, arguments):
    """Run a rung as cupy would be asked to; the arguments are numpy's scalars, pointers among them."""
    on, symbols = machine(kernel)
    faults = on.launch(symbols[name], blocks, THREADS, arguments)
    assert faults == [], faults


def _plain(symbol):
    demangled = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    return re.sub(r"\(.*", "", demangled.removeprefix("void "))
