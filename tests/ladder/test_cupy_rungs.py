"""The cupy rungs: what they launch runs on the host by g++, what they compile goes through NVRTC, and both on a GPU."""

import importlib.util

import pytest
import torch
from fakes.nvrtc import nvrtc

from benchmarks.ladder import cupy_rungs
from benchmarks.ladder.check import wrong
from benchmarks.ladder.rungs import KERNELS, RUNGS, Unavailable

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LONGEST = 9001
CUPY = importlib.util.find_spec("cupy") is not None


@pytest.fixture
def started_by(monkeypatch):
    """Let ``run(kernel, name, blocks, arguments)`` stand for NVRTC and the GPU."""

    def start(run):
        class Module:
            def __init__(self, kernel, names):
                self.kernel, self.names = kernel, names

            def get_function(self, name):
                assert name in self.names
                return lambda blocks, given: run(self.kernel, name, blocks, given)

        monkeypatch.setattr(cupy_rungs, "compiled", Module)
        monkeypatch.setattr(cupy_rungs, "_start", lambda function, blocks, given, _: function(blocks, given))
        return cupy_rungs.prepare

    return start


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_on_the_host(started_by, on_host, kernel, rung):
    hosted = started_by(lambda kernel, *given: on_host.run(on_host.library(kernel), kernel, *given))
    assert wrong(hosted, kernel, rung, CPU, LONGEST) == []


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_from_ptx(started_by, on_ptx, kernel, rung):
    assert wrong(started_by(on_ptx.run), kernel, rung, CPU, LONGEST) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_nvrtc_compiles_every_kernel_by_its_name(on_host, kernel):
    found = nvrtc()
    program = found.createProgram(cupy_rungs.source(kernel), f"{kernel}.cu", (), ())
    for name in on_host.names(kernel):
        found.addNameExpression(program, name)
    try:
        found.compileProgram(program, ("-arch=sm_90", *cupy_rungs.options()))
    except found.NVRTCError:
        pytest.fail(found.getProgramLog(program))
    code = found.getCUBIN(program)
    assert code.startswith(b"\x7fELF")
    assert all(found.getLoweredName(program, name).encode() in code for name in on_host.names(kernel))


def test_without_cupy_it_says_so(monkeypatch):
    monkeypatch.setitem(importlib.import_module("sys").modules, "cupy", None)
    with pytest.raises(Unavailable, match="no cupy: "):
        cupy_rungs._cupy()


@pytest.mark.skipif(not CUPY, reason="cupy is not installed")
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_on_a_gpu(gpu, kernel, rung):
    assert wrong(cupy_rungs.prepare, kernel, rung, gpu, LONGEST) == []
