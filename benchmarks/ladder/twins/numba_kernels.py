"""Three of the kernels again, in Python, for readers who have never seen CUDA C++.

A kernel is written for one thread: it works out which element is its own, and does that one.  Neighbouring threads take
neighbouring elements, so that the 32 of a warp read one stretch of memory together.  These kernels compute the same as
:func:`mgpu_core.kernels.pack`, :func:`~mgpu_core.kernels.sum_ranks` and :func:`~mgpu_core.kernels.sgd`, for
float32 and float64, and leave out the optimizations of those: 16 bytes an access, tables inside the launch's arguments,
one look at the table of segments per block.  Nothing else here uses them.

numba knows no pointers inside a kernel, so a table of arrays is a tuple of them; its length is part of the kernel's
type.  Without a GPU they run in numba's simulator (``NUMBA_ENABLE_CUDASIM=1``), on tensors of the CPU.
"""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from mgpu_core.devices.memory import note_written
from mgpu_core.kernels.tensor_arguments import as_tensors, check_like, check_outs

numba: Any = import_module("numba")
cuda: Any = import_module("numba.cuda")

__all__ = ["MOST_ARRAYS", "pack", "sgd", "sum_ranks"]

MOST_ARRAYS = 16  # of one launch
THREADS = 256  # of a block
PER_THREAD = 4  # elements of a tile that one thread does
BEGIN, COUNT, GROUP, STEP, ACTIVE = range(5)  # the columns of a segment table
RATE, KEEP, FRESH, DECAY, FACTOR, NESTEROV, FIRST, TAKES_PART = range(8)  # what a segment's arithmetic needs
CLIP, FOUND_INF = range(2)
_WIDE = {torch.float32: np.float32, torch.float64: np.float64}


@cuda.jit(device=True)
def owner_of(first_tile: Any, tile: Any) -> Any:
    """Return the index of the segment that holds ``tile``: the last whose first tile is not after it."""
    low, high = 0, len(first_tile) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if first_tile[middle] <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@cuda.jit
def pack_kernel(sources: Any, first_tile: Any, begins: Any, flat: Any, scale: Any) -> None:
    """Copy one tile of one source per block; ``scale`` has the compute dtype."""
    position = owner_of(first_tile, cuda.blockIdx.x)
    source = sources[position]
    first = (cuda.blockIdx.x - first_tile[position]) * cuda.blockDim.x * PER_THREAD + cuda.threadIdx.x
    for step in range(PER_THREAD):
        i = first + step * cuda.blockDim.x
        if i < source.shape[0]:
            flat[begins[position] + i] = source[i] * scale


@cache
def sum_kernel(op: str) -> Any:
    """Return the kernel of one operation: another function inside, so another program."""
    combine = cuda.jit(device=True)(_COMBINE[op])

    @cuda.jit
    def kernel(sources: Any, out: Any, divisor: Any) -> None:
        i = cuda.grid(1)
        if i >= out.shape[0]:
            return
        total = sources[0][i]
        for rank in range(1, len(sources)):
            total = combine(total, sources[rank][i])
        out[i] = total / divisor

    return kernel


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    # A NaN on either side wins: it is the only number that is not itself.
    "min": lambda a, b: a if a < b or a != a else b,
    "max": lambda a, b: a if a > b or a != a else b,
}


@cuda.jit
def prepare_kernel(segments: Any, groups: Any, scalars: Any, constants: Any) -> None:
    """Raise each segment's step and compute the constants of its elements, one thread per segment."""
    position = cuda.grid(1)
    if position >= segments.shape[0]:
        return
    takes_part = scalars[FOUND_INF] == 0 and segments[position, ACTIVE] != 0
    constants[position, TAKES_PART] = takes_part
    if not takes_part:
        return
    segments[position, STEP] += 1
    group = groups[segments[position, GROUP]]  # lr, momentum, dampening, weight_decay, nesterov, maximize
    constants[position, RATE] = group[0]
    constants[position, KEEP] = group[1]
    constants[position, FRESH] = 1 - group[2]
    constants[position, DECAY] = group[3]
    constants[position, FACTOR] = (-1 if group[5] != 0 else 1) * scalars[CLIP]
    constants[position, NESTEROV] = group[4]
    constants[position, FIRST] = segments[position, STEP] == 1


@cuda.jit(device=True)
def segment_at(segments: Any, element: Any) -> Any:
    """Return the segment in which ``element`` lies, or the next one; the number of segments if there is none."""
    low, high = 0, segments.shape[0]
    while low < high:
        middle = (low + high) // 2
        if segments[middle, BEGIN] + segments[middle, COUNT] <= element:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit
def sgd_kernel(parameters: Any, gradients: Any, momenta: Any, segments: Any, constants: Any) -> None:
    """Update one element per thread; each looks up its segment, which the CUDA kernel does once per block."""
    i = cuda.grid(1)
    position = segment_at(segments, i)
    if position == segments.shape[0] or i < segments[position, BEGIN] or constants[position, TAKES_PART] == 0:
        return
    of = constants[position]
    gradient = gradients[i] * of[FACTOR] + of[DECAY] * parameters[i]
    if of[KEEP] != 0:
        momentum = gradient
        if of[FIRST] == 0:
            momentum = of[KEEP] * momenta[i] + of[FRESH] * gradient
        momenta[i] = momentum
        gradient = gradient + of[KEEP] * momentum if of[NESTEROV] != 0 else momentum
    parameters[i] = parameters[i] - of[RATE] * gradient


def pack(
    tensors: Sequence[Any], *, dtype: torch.dtype | None = None, scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Pack as :func:`mgpu_core.kernels.pack` does, one launch per :data:`MOST_ARRAYS` tensors."""
    sources = as_tensors(tensors, "tensors")
    dtype = dtype or sources[0].dtype
    wide = _check(sources[0].dtype, dtype)
    begins = list(accumulate((source.numel() for source in sources), initial=0))
    flat = torch.empty(begins[-1], dtype=dtype, device=sources[0].device) if out is None else out
    check_like(flat, "out", (begins[-1],), dtype)
    check_outs([flat], ["out"], sources)
    there = [(source, begin) for source, begin in zip(sources, begins, strict=False) if source.numel()]
    for start in range(0, len(there), MOST_ARRAYS):
        _pack(there[start : start + MOST_ARRAYS], flat, wide(scale))
    note_written([flat])
    return flat


def _pack(pieces: Sequence[tuple[torch.Tensor, int]], flat: torch.Tensor, scale: Any) -> None:
    tiles = [-(-source.numel() // (THREADS * PER_THREAD)) for source, _ in pieces]
    first_tile = torch.tensor(list(accumulate(tiles, initial=0))[:-1], device=flat.device)
    begins = torch.tensor([begin for _, begin in pieces], device=flat.device)
    arrays = [_array(source.reshape(-1)) for source, _ in pieces]
    # Fill the tuple up to MOST_ARRAYS: numba compiles a kernel for each length of a tuple.
    arrays += arrays[-1:] * (MOST_ARRAYS - len(arrays))
    _launch(pack_kernel, sum(tiles), flat, tuple(arrays), first_tile, begins, flat, scale)


def sum_ranks(tensors: Sequence[Any], op: str = "sum", *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum as :func:`mgpu_core.kernels.sum_ranks` does, for up to :data:`MOST_ARRAYS` tensors."""
    sources = as_tensors(tensors, "tensors")
    if op not in _COMBINE:
        raise ValueError(f"op must be one of {', '.join(_COMBINE)}, not {op!r}")
    if len(sources) > MOST_ARRAYS:
        raise ValueError(f"one launch has room for {MOST_ARRAYS} tensors, not for {len(sources)}")
    wide = _check(sources[0].dtype)
    out = torch.empty_like(sources[0]) if out is None else out
    for position, source in enumerate([*sources, out]):
        check_like(source, "out" if source is out else f"tensors[{position}]", sources[0].shape, sources[0].dtype)
    check_outs([out], ["out"], sources)
    divisor = wide(len(sources) if op == "avg" else 1)
    arrays = tuple(_array(source.reshape(-1)) for source in sources)
    _launch(sum_kernel(op), -(-out.numel() // THREADS), out, arrays, out.view(-1), divisor)
    note_written([out])
    return out


def sgd(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor | None,
    segments: torch.Tensor,
    groups: torch.Tensor,
    *,
    clip: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Step as :func:`mgpu_core.kernels.sgd` does."""
    _check(parameters.dtype)
    constants = torch.empty(len(segments), 8, dtype=parameters.dtype, device=parameters.device)
    given = (clip, 1.0), (found_inf, 0.0)
    scalars = constants.new_tensor([default for _, default in given], dtype=torch.float32)
    for position, (scalar, _) in enumerate(given):
        if scalar is not None:
            scalars[position] = scalar.view(())
    momenta = gradients if momentum is None else momentum  # not touched where no group has momentum
    _launch(prepare_kernel, -(-len(segments) // THREADS), parameters, segments, groups, scalars, constants)
    blocks = -(-parameters.numel() // THREADS)
    _launch(sgd_kernel, blocks, parameters, parameters, gradients, momenta, segments, constants)
    note_written([parameters, segments, *([] if momentum is None else [momentum])])


def _check(*dtypes: torch.dtype) -> Any:
    """Return the constructor of the compute dtype: numba would take a Python float for float64."""
    for dtype in dtypes:
        if dtype not in _WIDE:
            raise TypeError(f"the numba kernels work on float32 and float64, not on {dtype}")
    return _WIDE[torch.float64 if torch.float64 in dtypes else torch.float32]


def _launch(kernel: Any, blocks: int, where: torch.Tensor, *arguments: Any) -> None:
    """Put a kernel on the current stream of the tensor's device."""
    if not blocks:
        return
    given = [_array(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    if where.is_cuda:
        handle = torch.cuda.current_stream(where.device).cuda_stream
        with cuda.gpus[where.device.index]:
            kernel[blocks, THREADS, cuda.external_stream(handle) if handle else cuda.default_stream()](*given)
    else:
        kernel[blocks, THREADS](*given)


def _array(tensor: torch.Tensor) -> Any:
    """Return the tensor's memory as numba sees it."""
    if tensor.is_cuda:
        return cuda.as_cuda_array(tensor.detach())
    if not numba.config.ENABLE_CUDASIM:
        raise ValueError("the numba kernels need tensors of a GPU, or the simulator: NUMBA_ENABLE_CUDASIM=1")
    return tensor.detach().numpy()
