"""The CUDA C++ rungs: on the host by g++ everywhere, to machine code where nvcc is, and on a GPU where there is one."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import mgpu_core
from benchmarks.ladder import cuda_library, cuda_rungs
from benchmarks.ladder.check import wrong
from benchmarks.ladder.problems import PackProblem, SumProblem
from benchmarks.ladder.rungs import KERNELS, RUNGS, Unavailable

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LONGEST = 9001


@pytest.fixture
def hosted(on_host, monkeypatch):
    """Use the launchers of the host's libraries instead of nvcc's."""
    monkeypatch.setattr(cuda_rungs, "library", lambda kernel, _: on_host.library(kernel))
    return cuda_rungs.prepare


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_on_the_host(hosted, kernel, rung):
    assert wrong(hosted, kernel, rung, CPU, LONGEST) == []


def test_a_rung_that_does_less_is_found(hosted, monkeypatch):
    """The check sees one missing launch, one missing element and one that is too many."""
    problem = PackProblem([40, 8], CPU)
    launch = hosted(problem, "fused")
    problem.reset(1)
    launch()
    assert problem.wrong() == 0
    problem.output.inside[3] += 1
    assert problem.wrong() == 1
    problem.output._guarded[0] = problem.output._guarded[-1] = 0
    assert problem.wrong() == 3
    monkeypatch.setattr(cuda_rungs, "piece_table", lambda *_: (torch.zeros(0, 4, dtype=torch.int64), 0))
    problem.reset(2)
    hosted(problem, "fused")()
    assert problem.wrong() == 48


def test_half_precision_is_rounded_once(hosted):
    """2048 + 1 + 1 is 2048 if each sum is rounded to float16, and 2050 if only the last is."""
    problem = SumProblem(9, 3, CPU, torch.float16)
    for rung in RUNGS:
        problem.reset(1)
        hosted(problem, rung)()
        assert problem.output.inside[0].item() == 2050


def test_a_launch_that_fails_says_so(on_host, monkeypatch):
    class Refusing:
        def __getattr__(self, name):
            return lambda *_: 700

    monkeypatch.setattr(cuda_rungs, "library", lambda *_: Refusing())
    with pytest.raises(cuda_rungs.LaunchFailed, match="sum_ranks, naive: CUDA error 700"):
        cuda_rungs.prepare(SumProblem(3, 2, CPU), "naive")()


@pytest.fixture(scope="module")
def nvcc():
    try:
        return cuda_library.nvcc()
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_nvcc_builds_a_library_once(nvcc, tmp_path):
    library = cuda_library.build("sum_ranks", "sm_90", tmp_path)
    assert re.fullmatch(r"sum_ranks-sm_90-[0-9a-f]{12}\.so", library.name)
    before = library.stat().st_mtime_ns
    assert cuda_library.build("sum_ranks", "sm_90", tmp_path) == library
    assert library.stat().st_mtime_ns == before
    assert os.listdir(tmp_path) == [library.name]
    functions = cuda_library.opened(library)
    assert all(hasattr(functions, f"sum_ranks_{rung}") for rung in RUNGS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_the_compiler_made_of_a_rung(nvcc, kernel, tmp_path):
    """Only the later rungs store 16 bytes an access, and only the first two never do: read from the PTX."""
    path = tmp_path / "code.ptx"
    command = [nvcc, "-ptx", "-std=c++17", "-O3", "--fmad=false", "-arch=sm_90", cuda_library.KERNELS / f"{kernel}.cu"]
    subprocess.run([*command, "-o", path], check=True, timeout=100)
    bodies = re.split(r"\.entry ", path.read_text())[1:]
    wide = {re.match(r"\w+", body)[0]: ".v4" in "".join(re.findall(r"st\.global\S*", body)) for body in bodies}
    assert {rung for rung in RUNGS if any(rung in name for name in wide)} == set(RUNGS)
    for name, is_wide in wide.items():
        assert is_wide == ("vectorised" in name or "fused" in name), name
    assert "st.local" not in path.read_text()


def test_without_nvcc_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_library, "_candidates", lambda: iter([tmp_path / "nvcc"]))
    with pytest.raises(Unavailable, match="no nvcc: install CUDA's toolkit, or nvidia-cuda-nvcc from PyPI"):
        cuda_library.build("pack", folder=tmp_path)


def test_what_nvcc_says_is_handed_on(monkeypatch, tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 2\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(cuda_library, "_candidates", lambda: iter([compiler]))
    with pytest.raises(Unavailable, match=r"cannot compile pack.cu for sm_90:\nno such thing"):
        cuda_library.build("pack", folder=tmp_path / "build")
    assert os.listdir(tmp_path / "build") == []


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_on_a_gpu(gpu, nvcc, kernel, rung):
    assert wrong(cuda_rungs.prepare, kernel, rung, gpu, LONGEST) == []


def test_the_package_does_not_import_the_ladder():
    importing = re.compile(r"^\s*(?:from|import) .*\b(?:ladder|benchmarks)\b", re.MULTILINE)
    package = Path(mgpu_core.__file__).parent
    assert not [path for path in package.rglob("*.py") if importing.search(path.read_text())]
