"""The CUDA C++ rungs from Python: a struct with what a call needs, and one C function per rung.

`prepare` does everything that is not the kernel's work: it builds the library, fills the struct and copies tables to
the GPU. What it returns only launches, on torch's current stream.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from benchmarks.ladder import cuda_library
from benchmarks.ladder.problems import GatherProblem, PackProblem, Problem, SumProblem


class LaunchFailed(RuntimeError):
    """The CUDA runtime refused a launch; the message has its code."""


class Pack(ctypes.Structure):
    """As in kernels/pack.cu."""

    _fields_ = (
        ("host_pieces", ctypes.c_void_p),
        ("device_pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_int),
        ("in_half", ctypes.c_int),
        ("out_half", ctypes.c_int),
        ("scratch", ctypes.c_void_p),
        ("flat", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class SumRanks(ctypes.Structure):
    """As in kernels/sum_ranks.cu."""

    _fields_ = (
        ("host_in", ctypes.c_void_p),
        ("device_in", ctypes.c_void_p),
        ("ranks", ctypes.c_int),
        ("half", ctypes.c_int),
        ("scratch", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class GatherRows(ctypes.Structure):
    """As in kernels/gather_rows.cu."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("row_count", ctypes.c_int64),
        ("index", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("picked", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("half", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("shift", ctypes.c_float),
    )


def prepare(problem: Problem, rung: str) -> Callable[[], None]:
    """What runs the rung once on the problem's tensors.

    Raises:
        Unavailable: no nvcc, or it cannot compile.
    """
    functions = library(problem.kernel, _arch(problem.device))
    call, kept = _CALLS[problem.kernel](functions, problem)
    function, stream = getattr(functions, f"{problem.kernel}_{rung}"), _stream(problem.device)

    def launch() -> None:
        if code := function(ctypes.byref(call), stream):
            raise LaunchFailed(f"{problem.kernel}, {rung}: CUDA error {code}")

    launch.kept = kept  # type: ignore[attr-defined]  # the tables live as long as who reads them
    return launch


@cache
def library(kernel: str, arch: str) -> ctypes.CDLL:
    """Built and opened once a process."""
    return cuda_library.opened(cuda_library.build(kernel, arch))


def piece_table(problem: PackProblem, tile: int) -> tuple[torch.Tensor, int]:
    """Rows of pointer, begin, count and first tile, without empty tensors, on the host; and the number of tiles."""
    rows, tiles = [], 0
    for tensor, begin, count in zip(problem.tensors, problem.begins, problem.counts, strict=True):
        if count:
            rows.append((tensor.data_ptr(), begin, count, tiles))
            tiles += -(-count // tile)
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4), tiles


def is_half(dtype: torch.dtype) -> bool:
    """Of the two dtypes that the rungs know."""
    return dtype == torch.float16


def _pack(functions: ctypes.CDLL, problem: PackProblem) -> tuple[Pack, object]:
    halves = tuple(map(is_half, problem.dtypes))
    functions.pack_tile.restype = ctypes.c_int64
    table, tiles = piece_table(problem, functions.pack_tile(*halves))
    there = table.to(problem.device)
    pointers = problem.scratch.data_ptr(), problem.output.inside.data_ptr()
    scalars = problem.count, tiles, problem.scale
    return Pack(table.data_ptr(), there.data_ptr(), len(table), *halves, *pointers, *scalars), (table, there)


def _sum_ranks(_: ctypes.CDLL, problem: SumProblem) -> tuple[SumRanks, object]:
    table = torch.tensor([tensor.data_ptr() for tensor in problem.tensors], dtype=torch.int64)
    there = table.to(problem.device)
    pointers = problem.scratch.data_ptr(), problem.output.inside.data_ptr()
    scalars = problem.ranks, is_half(problem.dtype)
    return SumRanks(table.data_ptr(), there.data_ptr(), *scalars, *pointers, problem.count), (table, there)


def _gather_rows(_: ctypes.CDLL, problem: GatherProblem) -> tuple[GatherRows, object]:
    rows, index = (problem.rows.data_ptr(), problem.row_count), (problem.index.data_ptr(), problem.batch)
    pointers = problem.picked.data_ptr(), problem.output.inside.data_ptr()
    return GatherRows(*rows, *index, *pointers, is_half(problem.dtype), problem.scale, problem.shift_by), None


_CALLS: dict[str, Callable[..., tuple[ctypes.Structure, object]]] = {
    "pack": _pack,
    "sum_ranks": _sum_ranks,
    "gather_rows": _gather_rows,
}


def _arch(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else cuda_library.ARCH


def _stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
