"""Three of the kernels again, as CUDA C++ in a string: compiled when they are first called, by CUDA's own NVRTC.

For readers who want to change a kernel and run it a second later: change `cupy_sources.py`, beside this.  The
kernels compute the same as :func:`mgpu_core.kernels.pack`, :func:`~mgpu_core.kernels.sum_ranks` and
:func:`~mgpu_core.kernels.sgd`, for float32 and float64 on a GPU.  Nothing else here uses them.

Tables lie in the device's memory, where ours travel inside the launch's arguments: one more thing to send and to wait
for, and not to lose before the kernel has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from benchmarks.ladder.twins.cupy_sources import OPS, SOURCES, TILE, compiler_options
from mgpu_core.devices.memory import note_written
from mgpu_core.kernels.tensor_arguments import as_tensors, check_like, check_outs, on_one_device

cupy: Any = import_module("cupy")

__all__ = ["pack", "sgd", "sum_ranks"]

THREADS = 256  # of a block


def pack(
    tensors: Sequence[Any], *, dtype: torch.dtype | None = None, scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Pack as :func:`mgpu_core.kernels.pack` does."""
    sources = as_tensors(tensors, "tensors")
    dtype = dtype or sources[0].dtype
    module = _module("pack", sources[0].dtype, dtype)
    begins = list(accumulate((source.numel() for source in sources), initial=0))
    flat = torch.empty(begins[-1], dtype=dtype, device=sources[0].device) if out is None else out
    check_like(flat, "out", (begins[-1],), dtype)
    check_outs([flat], ["out"], sources)
    device = _gpu(flat, *sources)
    rows, tiles = [], 0
    for source, begin in zip(sources, begins, strict=False):
        rows.append((_pointer(source), begin, source.numel(), tiles))
        tiles += -(-source.numel() // TILE)
    table = torch.tensor([row for row in rows if row[2]], dtype=torch.int64, device=device)
    wide = _number(torch.float64 if torch.float64 in (sources[0].dtype, dtype) else torch.float32)
    _launch(module, "pack", tiles, device, table, np.int32(len(table)), flat, wide(scale))
    note_written([flat])
    return flat


def sum_ranks(tensors: Sequence[Any], op: str = "sum", *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum as :func:`mgpu_core.kernels.sum_ranks` does."""
    sources = as_tensors(tensors, "tensors")
    first = sources[0]
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")
    module = _module("sum_ranks", first.dtype, None, op)
    out = torch.empty_like(first) if out is None else out
    for position, source in enumerate([*sources, out]):
        check_like(source, "out" if source is out else f"tensors[{position}]", first.shape, first.dtype)
    check_outs([out], ["out"], sources)
    device = _gpu(out, *sources)
    table = torch.tensor([_pointer(source) for source in sources], dtype=torch.int64, device=device)
    ranks, count = np.int32(len(sources)), np.int64(out.numel())
    divisor = _number(first.dtype)(len(sources) if op == "avg" else 1)
    together = np.bool_(_together(out, *sources))
    _launch(module, "sum_ranks", -(-out.numel() // TILE), device, table, ranks, out, count, divisor, together)
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
    flats = [parameters, gradients, *([] if momentum is None else [momentum])]
    scalars = [clip, found_inf]
    module = _module("sgd", parameters.dtype)
    device = _gpu(*flats, segments, groups, *(scalar for scalar in scalars if scalar is not None))
    rows = np.int64(len(segments))
    constants = torch.empty(len(segments), 8, dtype=torch.float64, device=device)
    _launch(module, "prepare_sgd", -(-len(segments) // THREADS), device, segments, rows, groups, *scalars, constants)
    count, together = np.int64(parameters.numel()), np.bool_(_together(*flats))
    tables = segments, rows, constants
    blocks = -(-parameters.numel() // TILE)
    _launch(module, "sgd", blocks, device, parameters, gradients, momentum, count, *tables, together)
    note_written([segments, parameters, *flats[2:]])


@cache
def _module(name: str, *choice: Any) -> Any:
    """Return the program of a source: compiled when its first kernel is asked for, once per device."""
    return cupy.RawModule(code=SOURCES[name], options=compiler_options(*choice), backend="nvrtc")


def _launch(module: Any, name: str, blocks: int, device: torch.device, *arguments: Any) -> None:
    """Put a kernel on torch's current stream of the device.  A tensor stands for its pointer, None for a null one."""
    if not blocks:
        return
    given = [_pointer(each) if isinstance(each, torch.Tensor) or each is None else each for each in arguments]
    with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream):
        module.get_function(name)((blocks,), (THREADS,), tuple(given))


def _pointer(tensor: torch.Tensor | None) -> Any:
    return np.uint64(0 if tensor is None else tensor.detach().__cuda_array_interface__["data"][0])


def _number(dtype: torch.dtype) -> Any:
    """Return the constructor of a scalar argument of that dtype."""
    return np.float64 if dtype == torch.float64 else np.float32


def _together(*tensors: torch.Tensor) -> bool:
    """Return whether they are all as far from a multiple of 16 bytes."""
    return len({int(_pointer(tensor)) % 16 for tensor in tensors}) == 1


def _gpu(*tensors: torch.Tensor) -> torch.device:
    """Return the GPU of all of them."""
    device = on_one_device(**{f"tensor {position}": tensor for position, tensor in enumerate(tensors)})
    if device.type != "cuda":
        raise ValueError(f"the cupy kernels need tensors of a GPU, not of {device}")
    return device
