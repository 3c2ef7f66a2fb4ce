"""The same kernels as cupy's RawKernels: their text is compiled by NVRTC when a rung is first prepared.

The text is the CUDA C++ of `kernels/*.cuh`, so a rung here differs from its CUDA twin only in who compiles it and who
starts it: no nvcc, no C launcher, no build folder. Change a kernel and run it again a second later. The launchers of
`kernels/*.cu` stand here once more, in Python: how many blocks, and which arguments.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ladder.cuda_library import KERNELS
from benchmarks.ladder.cuda_rungs import is_half, piece_table
from benchmarks.ladder.problems import GatherProblem, PackProblem, Problem, SumProblem
from benchmarks.ladder.rungs import Unavailable

THREADS, STRETCH, IN_FLIGHT, MOST_BLOCKS = 256, 32, 4, 4096
"""As kThreads, kStretch and kInFlight in kernels/common.cuh, and kMostBlocks in kernels/launch.cuh."""

Launch = tuple[str, int, tuple[Any, ...]]
"""A kernel by its C++ name, its blocks, its arguments. A tensor stands for its pointer, None for a null one."""


def prepare(problem: Problem, rung: str) -> Callable[[], None]:
    """What runs the rung once on the problem's tensors.

    Raises:
        Unavailable: there is no cupy here that can compile.
    """
    launches = [launch for launch in _LAUNCHES[problem.kernel](problem, rung) if launch[1]]
    module = compiled(problem.kernel, tuple(dict.fromkeys(name for name, _, _ in launches)))
    ready = [(module.get_function(name), blocks, tuple(map(_argument, given))) for name, blocks, given in launches]

    def launch() -> None:
        for function, blocks, given in ready:
            _start(function, blocks, given, problem.device)

    launch.kept = launches  # type: ignore[attr-defined]  # the tables live as long as who reads them
    return launch


@cache
def compiled(kernel: str, names: tuple[str, ...]) -> Any:
    """The program with these kernels of a .cuh file; templates are compiled only by name."""
    cupy = _cupy()
    return cupy.RawModule(code=source(kernel), options=options(), backend="nvrtc", name_expressions=names)


def source(kernel: str) -> str:
    """What NVRTC is given: one line."""
    return f'#include "{kernel}.cuh"\n'


def options() -> tuple[str, ...]:
    """Where the text lies and where cuda_fp16.h does; no fused multiply-add: the bits of the reference."""
    root = import_module("cupy._environment").get_cuda_path()
    headers = () if root is None else (f"-I{Path(root) / 'include'}",)
    return ("-std=c++17", "--fmad=false", f"-I{KERNELS}", *headers)


def _cupy() -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise Unavailable(f"no cupy: {error}") from error


def _start(function: Any, blocks: int, given: tuple[Any, ...], device: torch.device) -> None:
    cupy = _cupy()
    with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream):
        function((blocks,), (THREADS,), given)


def _argument(value: Any) -> Any:
    if value is None:
        return np.uint64(0)
    return np.uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else value


def _pack(problem: PackProblem, rung: str) -> Iterator[Launch]:
    in_name, out_name = map(_c_name, problem.dtypes)
    flat, scale = problem.output.inside, np.float32(problem.scale)
    if rung == "fused":
        width = 16 // min(dtype.itemsize for dtype in problem.dtypes)
        table, tiles = piece_table(problem, THREADS * IN_FLIGHT * width)
        there = table.to(problem.device)
        yield f"pack_fused<{in_name}, {out_name}>", tiles, (there, np.int32(len(table)), flat, scale)
        return
    blocks = _naive_blocks if rung == "naive" else _few_blocks
    for tensor, begin in zip(problem.tensors, problem.begins, strict=True):
        count = tensor.numel()
        given = tensor, problem.scratch[begin:], np.int64(count), np.float32(1)
        yield f"pack_{rung}<{in_name}, {in_name}>", blocks(count), given
    given = problem.scratch, flat, np.int64(problem.count), scale
    yield f"pack_{rung}<{in_name}, {out_name}>", blocks(problem.count), given


def _sum_ranks(problem: SumProblem, rung: str) -> Iterator[Launch]:
    name, count, out = _c_name(problem.dtype), np.int64(problem.count), problem.output.inside
    if rung == "fused":
        table = torch.tensor([tensor.data_ptr() for tensor in problem.tensors], device=problem.device)
        blocks = -(-problem.count // (THREADS * 16 // problem.dtype.itemsize))
        yield f"sum_fused<{name}>", blocks, (table, np.int32(problem.ranks), out, count)
        return
    blocks = (_naive_blocks if rung == "naive" else _few_blocks)(problem.count)
    total = None
    for tensor in problem.tensors[:-1]:
        yield f"sum_{rung}<{name}, float>", blocks, (total, tensor, problem.scratch, count)
        total = problem.scratch
    yield f"sum_{rung}<{name}, {name}>", blocks, (total, problem.tensors[-1], out, count)


def _gather_rows(problem: GatherProblem, rung: str) -> Iterator[Launch]:
    row_count, batch = np.int64(problem.row_count), np.int64(problem.batch)
    out, name = problem.output.inside, _c_name(problem.dtype)
    line = np.float32(problem.scale), np.float32(problem.shift_by)
    if rung == "fused":
        given = problem.rows, row_count, problem.index, batch, out, *line
        yield f"gather_fused<{name}>", -(-problem.batch // IN_FLIGHT), given
        return
    naive = -(-problem.batch // THREADS)
    pick, normalise = min(problem.batch, MOST_BLOCKS), _few_blocks(problem.batch * problem.row_count)
    if rung == "naive":
        pick = normalise = naive
    yield f"pick_{rung}", pick, (problem.rows, row_count, problem.index, batch, problem.picked)
    yield f"normalise_{rung}<{name}>", normalise, (problem.picked, row_count, batch, out, *line)


_LAUNCHES: dict[str, Callable[..., Iterator[Launch]]] = {
    "pack": _pack,
    "sum_ranks": _sum_ranks,
    "gather_rows": _gather_rows,
}


def _c_name(dtype: torch.dtype) -> str:
    return "__half" if is_half(dtype) else "float"


def _naive_blocks(count: int) -> int:
    return -(-count // (THREADS * STRETCH))


def _few_blocks(count: int) -> int:
    return min(-(-count // THREADS), MOST_BLOCKS)
