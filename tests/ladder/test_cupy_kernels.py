"""The cupy kernels against the plain-torch references, on small whole numbers.

On the host everywhere: their CUDA C++ is compiled by g++ there (`cupy_on_host.py`). From nvcc's PTX of it on the PTX
machine, where nvcc is. To a GPU's machine code where cupy and libnvrtc are. And on a GPU where there is one.
"""

import importlib
import importlib.util
import itertools
import shutil
import sys
import types
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import ptx
from fakes.nvrtc import nvrtc

from benchmarks.ladder.twins.cupy_sources import OPS, SOURCES, compiler_options
from mgpu_core.kernels import reference, segment_table, sgd_groups

pytestmark = [pytest.mark.fakes, pytest.mark.slow]

_SPEC = importlib.util.spec_from_file_location("cupy_on_host", Path(__file__).with_name("cupy_on_host.py"))
cupy_on_host = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cupy_on_host)

DTYPES = [torch.float32, torch.float64]
COUNTS = [0, 1, 31, 64, 0, 129, 5, 1000]
POISON = 77
CUPY = importlib.util.find_spec("cupy") is not None


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """The twins over g++ and the CPU; what they need of cupy is its name."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cupy-on-host")
    twins = without_cupy(lambda *choice: cupy_on_host.build(folder, *choice), cupy_on_host.launch)
    twins.TILE, twins.THREADS = cupy_on_host.TILE, cupy_on_host.THREADS
    return twins


@pytest.fixture(scope="module")
def on_ptx(tmp_path_factory):
    """The twins over nvcc's PTX and the PTX machine."""
    if reason := ptx.what_is_missing():
        pytest.skip(reason)
    source = tmp_path_factory.mktemp("cupy-on-ptx") / "twin.cu"

    def compiled(name, *choice):
        source.write_text(SOURCES[name])
        defines = [option for option in compiler_options(*choice) if option.startswith("-D")]
        machine = ptx.Machine(ptx.compile_ptx(source, 75, *defines))
        machine.allow_unknown_memory()
        return machine

    def launch(machine, name, blocks, *arguments):
        assert machine.launch(name, blocks, 256, arguments) == []

    return without_cupy(compiled, launch)


def without_cupy(compiled, launch):
    """A copy of the twins' module over host memory: ``compiled(name, *choice)`` is a program, ``launch`` runs it."""
    spec = importlib.util.find_spec("benchmarks.ladder.twins.cupy_kernels")
    twins = importlib.util.module_from_spec(spec)  # a copy of its own, so that the real one stays as it is
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
        spec.loader.exec_module(twins)
    twins._gpu = lambda *tensors: tensors[0].device
    twins._pointer = lambda tensor: np.uint64(0 if tensor is None else tensor.data_ptr())
    twins._module = cache(compiled)

    def launch_with_pointers(program, name, blocks, _device, *arguments):
        given = [twins._pointer(each) if each is None or torch.is_tensor(each) else each for each in arguments]
        if blocks:
            launch(program, name, blocks, *given)

    twins._launch = launch_with_pointers
    return twins


@pytest.fixture(params=["host", "ptx", "gpu"])
def index(request):
    """The twins and the device that they are tried on."""
    if request.param != "gpu":
        return request.getfixturevalue(f"on_{request.param}"), "cpu"
    if not torch.cuda.is_available() or not CUPY:
        pytest.skip("no GPU" if CUPY else "cupy is not installed")
    return importlib.import_module("benchmarks.ladder.twins.cupy_kernels"), "cuda:0"


def numbers(count, dtype, device, start=0, shift=1):
    """Small whole numbers, behind elements that are not theirs, so that their memory need not be aligned."""
    return ((torch.arange(count + shift, device=device) + start) % 13).to(dtype)[shift:]


def guarded(count, dtype, device, shift=1):
    """All, and the part to write, with a guard on both sides."""
    whole = torch.full((shift + count + 1,), POISON, dtype=dtype, device=device)
    return whole, whole[shift:-1]


@pytest.mark.parametrize(("dtype", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_pack(index, dtype, target):
    twins, device = index
    for shift, scale in itertools.product((0, 1, 4), (1.0, -0.5)):
        tensors = [numbers(count, dtype, device, start, start % 3) for start, count in enumerate(COUNTS)]
        whole, out = guarded(sum(COUNTS), target, device, shift)
        assert twins.pack(tensors, dtype=target, scale=scale, out=out) is out
        assert torch.equal(out, reference.pack(tensors, scale, target))
        assert whole[:shift].eq(POISON).all()
        assert whole[-1] == POISON


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_sum_ranks(index, op, dtype):
    twins, device = index
    for ranks, shift, other, count in itertools.product((1, 2, 5), (0, 1), (0, 1), (0, 5, 129)):
        tensors = [numbers(count, dtype, device, 5 * rank, other if rank == 1 else shift) for rank in range(ranks)]
        whole, out = guarded(count, dtype, device, shift)
        assert twins.sum_ranks(tensors, op, out=out) is out
        assert torch.equal(out, reference.sum_ranks(tensors, op))
        assert whole[-1] == POISON


@pytest.mark.parametrize(("op", "last"), [("min", 2.0), ("max", 3.0)])
def test_a_nan_wins(index, op, last):
    twins, device = index
    nan = float("nan")
    made = twins.sum_ranks([torch.tensor(row, device=device) for row in ([nan, 1.0, 2.0], [1.0, nan, 3.0])], op)
    assert made.isnan().tolist() == [True, True, False]
    assert made[2] == last


def flat(dtype, device, shifts):
    """Two groups, gaps, an empty segment, one that is not active, one over several tiles."""
    segments = segment_table([5, 0, 33, 7, 400], groups=[0, 0, 1, 1, 0], begins=[0, 5, 6, 39, 50], device=device)
    segments[3, 4] = 0
    momentum = {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125, "nesterov": 1, "maximize": 1}
    groups = sgd_groups(momentum, {"lr": 0.25}, device=device)
    tensors = [numbers(460, dtype, device, start, shift) for start, shift in enumerate(shifts, 1)]
    return tensors, segments, groups


@pytest.mark.parametrize("shifts", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_sgd(index, dtype, shifts, scaled):
    twins, device = index
    tensors, segments, groups = flat(dtype, device, shifts)
    truths, rows = [tensor.clone() for tensor in tensors], segments.clone()
    given = {"clip": torch.tensor([0.5], device=device)} if scaled else {}
    for overflow in (0.0, 1.0, 0.0):
        found = torch.tensor(overflow, device=device)
        twins.sgd(*tensors, segments, groups, **given, found_inf=found)
        reference.sgd(*truths, rows, groups, given.get("clip"), found)
        assert all(torch.equal(one, other) for one, other in zip(tensors, truths, strict=True))
        assert torch.equal(segments, rows)
    assert segments[:, 3].tolist() == [2, 2, 2, 0, 2]


def test_sgd_without_momentum(index):
    twins, device = index
    (parameters, gradients, _), segments, _ = flat(torch.float32, device, (0, 0, 0))
    groups = sgd_groups({"lr": 0.5}, {"lr": 0.25}, device=device)
    truth = parameters.clone()
    reference.sgd(truth, gradients, None, segments.clone(), groups, None, None)
    twins.sgd(parameters, gradients, None, segments, groups)
    assert torch.equal(parameters, truth)


def test_refusals(index):
    twins, device = index
    with pytest.raises(TypeError, match=r"float32 and float64, not on torch\.float16"):
        twins.pack([torch.ones(3, dtype=torch.float16, device=device)])
    with pytest.raises(ValueError, match="op must be one of sum, avg, prod, min, max, not 'mean'"):
        twins.sum_ranks([torch.ones(3, device=device)], "mean")
    with pytest.raises(ValueError, match=r"tensors\[1\] must be \(3,\)"):
        twins.sum_ranks([torch.ones(3, device=device), torch.ones(4, device=device)])


@pytest.mark.skipif(not CUPY, reason="cupy is not installed")
def test_tensors_of_the_cpu_are_refused():
    twins = importlib.import_module("benchmarks.ladder.twins.cupy_kernels")
    for call in (lambda one: twins.pack([one]), lambda one: twins.sum_ranks([one])):
        with pytest.raises(ValueError, match="need tensors of a GPU, not of cpu"):
            call(torch.ones(3))


CHOICES = [("pack", *pair) for pair in itertools.product(DTYPES, DTYPES)]
CHOICES += [("sum_ranks", dtype, None, op) for dtype, op in itertools.product(DTYPES, OPS)]
CHOICES += [("sgd", dtype) for dtype in DTYPES]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_it_compiles_to_machine_code(choice):
    found = nvrtc()
    name, *options = choice
    program = found.createProgram(SOURCES[name], f"{name}.cu", (), ())
    try:
        found.compileProgram(program, ("-arch=sm_90", *compiler_options(*options)))
    except found.NVRTCError:
        pytest.fail(found.getProgramLog(program))
    code = found.getCUBIN(program)
    assert code.startswith(b"\x7fELF")
    assert name.encode() in code
