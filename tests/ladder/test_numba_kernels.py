"""The numba kernels against the plain-torch references, in numba's simulator everywhere, and on a GPU if there is one.

The simulator is chosen by a variable that numba reads when it is imported, so all parts run in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from fakes.numba_here import skip_unless_numba_compiles

pytestmark = pytest.mark.slow

CASES = Path(__file__).parent / "numba_cases.py"
PARTS = ["packs", "many_pieces", "sums", "special_numbers", "steps_of_sgd", "a_step_without_momentum", "refusals"]
there = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


@cache
def output(device, simulated):
    """What `numba_cases.py` says of its parts."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1" if simulated else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(CASES), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@there
@pytest.mark.parametrize("part", PARTS)
def test_in_the_simulator(part):
    assert f"{part}: done\n" in output("cpu", simulated=True)


@there
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("part", PARTS)
def test_on_a_gpu(part):
    skip_unless_numba_compiles()
    assert f"{part}: done\n" in output("cuda", simulated=False)


@there
def test_they_compile_for_a_gpu():
    skip_unless_numba_compiles()
    assert output("compiles", simulated=False) == "compiles: done\n"


@there
def test_a_tensor_of_the_cpu_needs_the_simulator():
    assert "ValueError: the numba kernels need tensors of a GPU, or the simulator" in output("cpu", simulated=False)


@pytest.mark.slow
def test_the_package_does_not_import_it():
    program = "import sys, mgpu_core.kernels; sys.exit('numba' in sys.modules or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], timeout=100).returncode == 0
