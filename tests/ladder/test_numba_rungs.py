"""The numba rungs: in the simulator by the ladder's own command, to PTX by numba's compiler, and on a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.numba_here import skip_unless_numba_compiles

from benchmarks.ladder import languages
from benchmarks.ladder.check import wrong
from benchmarks.ladder.problems import PackProblem
from benchmarks.ladder.rungs import KERNELS, RUNGS, Unavailable

pytestmark = pytest.mark.slow

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "ladder" / "run.py"
there = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


def ladder(*arguments, **variables):
    """The command in a process of its own, on a machine without a GPU."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-P", str(RUN), *arguments]
    return subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=110)


@there
def test_all_rungs_in_the_simulator():
    done = ladder("--check", NUMBA_ENABLE_CUDASIM="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{kernel}, {rung}, numba: right" for kernel in KERNELS for rung in RUNGS]


WRONG = """
import sys
sys.path.append(sys.argv[1])
from benchmarks.ladder import check, run
from benchmarks.ladder.numba_rungs import pack
pack.IN_FLIGHT = 5  # tiles that four loads do not fill
check.RUNGS = ("naive", "fused")
sys.exit(run.main(["pack", "--check"]))
"""


@there
def test_a_wrong_rung_is_found_in_the_simulator():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", WRONG, str(RUN.parents[2])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "run.py: error: 1 rungs are wrong"
    assert re.search(r"^pack, fused, numba: WRONG\n  pack, fused, torch.float32 to .*: \d+ wrong$", done.stdout, re.M)
    assert "pack, naive, numba: right" in done.stdout


@there
def test_the_cpu_needs_the_simulator():
    from benchmarks.ladder import numba_rungs

    with pytest.raises(Unavailable, match="numba needs a GPU, or its simulator: NUMBA_ENABLE_CUDASIM=1"):
        numba_rungs.prepare(PackProblem([3], torch.device("cpu")), "naive")


@there
@pytest.mark.parametrize(("count", "shift"), [(0, 0), (1, 0), (1, 1), (2, 1), (9, 0), (9, 1)])
def test_parts_are_all_of_an_array_in_order(count, shift):
    from benchmarks.ladder.numba_rungs.launches import parts

    arrays = [torch.arange(count + 2, dtype=dtype)[shift:][:count] for dtype in (torch.float32, torch.uint8)]
    cut = parts(*arrays)
    for position, array in enumerate(arrays):
        assert all(arrays[position].data_ptr() % arrays[position].itemsize == 0 for _, arrays in cut)
        seen = [arrays[position].view(array.dtype) for _, arrays in cut]
        assert torch.equal(torch.cat([array[:0], *seen]), array)
    pairs = sum(arrays[0].numel() for paired, arrays in cut if paired)
    assert pairs == (count - min(shift, count)) // 2
    assert all(arrays[0].numel() == 1 for paired, arrays in cut if not paired)


@there
def test_what_cannot_be_paired_stays_single():
    from benchmarks.ladder.numba_rungs.launches import parts

    memory = torch.zeros(10)
    (apart,) = parts(memory[:8], memory[1:9])
    (half,) = parts(memory.half()[:8], memory[:8])
    for paired, arrays in (apart, half):
        assert not paired
        assert [array.numel() for array in arrays] == [8, 8]


def kernels():
    """Every kernel with the types that it is called with."""
    from numba import types

    from benchmarks.ladder.numba_rungs import gather_rows, pack, sum_ranks

    def array(dtype, dimensions=1):
        return types.Array(dtype, dimensions, "C")

    number, word, byte, pair, index = types.float32, types.int64, types.uint8, types.int16, types.int64
    for dtype in (types.float32, types.float16):
        yield pack.naive_kernel, (array(dtype), array(number), number)
        yield sum_ranks.naive_kernel, (array(number), array(dtype), array(dtype))
        yield gather_rows.normalise_naive_kernel, (array(byte, 2), array(dtype, 2), number, number)
    yield gather_rows.pick_naive_kernel, (array(byte, 2), array(index), array(byte, 2))
    yield gather_rows.pick_kernel, (array(word, 2), array(index), array(word, 2))
    for paired, one in ((True, word), (False, types.float32), (False, types.float16)):
        many = types.UniTuple(array(one), pack.MOST_ARRAYS)
        pixels = pair if paired else byte
        total = word if paired else number
        yield pack.each_kernel(paired), (array(one), array(one), number)
        yield pack.fused_kernel(paired), (many, many, array(index), number)
        yield sum_ranks.each_kernel(paired), (array(total), array(one), array(one))
        yield sum_ranks.fused_kernel(paired), (types.UniTuple(array(one), 4), array(one))
        yield gather_rows.normalise_kernel(paired), (array(pixels), array(one), number, number)
        yield gather_rows.fused_kernel(paired), (array(pixels, 2), array(index), array(one, 2), number, number)


@there
def test_they_compile_for_a_gpu(monkeypatch):
    """By numba's real compiler, which needs no GPU once it is told for which one; pairs are accesses of 8 bytes."""
    skip_unless_numba_compiles()
    from numba import types
    from numba.cuda import compile_ptx, dispatcher

    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    wide = []
    for kernel, arguments in kernels():
        ptx, _ = compile_ptx(kernel.py_func, types.void(*arguments), cc=(9, 0))
        assert ".target sm_90" in ptx
        wide.append(bool(re.search(r"\sst(\.global)?\.[bu]64", ptx)))
    assert wide.count(True) == 7


@there
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_on_a_gpu(gpu, kernel, rung):
    skip_unless_numba_compiles()
    from benchmarks.ladder import numba_rungs

    assert wrong(numba_rungs.prepare, kernel, rung, gpu, 20001) == []


def test_without_numba_it_says_so(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("benchmarks.ladder.numba_rungs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(Unavailable, match="no numba: "):
        languages.load("numba")
