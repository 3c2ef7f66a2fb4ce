"""From tensors to launches: how many blocks, which stream, and how arrays are cut into pairs of elements.

numba has no access of 16 bytes: one of its arrays is read element by element. What it can do is to see the same memory
as an array of wider elements, and 8 bytes is the widest that it reads at once: two float32 as one int64. So here a rung
is vectorised from outside: the same loop runs over other views, and only what it does with an element changes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

numba: Any = import_module("numba")
cuda: Any = import_module("numba.cuda")

SIMULATED: bool = bool(numba.config.ENABLE_CUDASIM)
THREADS = 4 if SIMULATED else 256
"""Of a block; a simulated thread is a thread of Python's."""
MOST_BLOCKS = 2 if SIMULATED else 4096
"""Of a grid-stride loop."""
numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

Launch = tuple[Any, int, tuple[Any, ...]]
"""A kernel, its blocks, its arguments: tensors, tuples of tensors, numbers."""
PAIR = {torch.float32: torch.int64, torch.uint8: torch.int16}
"""What two elements are, seen as one. Of float16 there is none: numba cannot turn bits into one."""


def blocks_of(count: int, per_thread: int = 1) -> int:
    """As many as it takes."""
    return -(-count // (THREADS * per_thread))


def few_blocks_of(count: int) -> int:
    """For a grid-stride loop."""
    return min(blocks_of(count), MOST_BLOCKS)


def context(device: torch.device) -> AbstractContextManager[object]:
    """numba works on this GPU inside; the simulator has none to choose."""
    return cuda.gpus[device.index] if device.type == "cuda" else nullcontext()


def ready(launch: Launch, device: torch.device) -> Callable[[], object]:
    """The launch with its arguments as numba's arrays, on torch's current stream."""
    kernel, blocks, given = launch
    arguments = [_array(each) for each in given]
    if device.type != "cuda":
        return lambda: kernel[blocks, THREADS](*arguments)
    handle = torch.cuda.current_stream(device).cuda_stream
    configured = kernel[blocks, THREADS, cuda.external_stream(handle) if handle else cuda.default_stream()]
    return lambda: configured(*arguments)


def _array(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_array, value))
    if not isinstance(value, torch.Tensor):
        return value
    return cuda.as_cuda_array(value) if value.is_cuda else value.numpy()


def parts(*arrays: torch.Tensor) -> list[tuple[bool, tuple[torch.Tensor, ...]]]:
    """Arrays of one length as up to three parts: a single element, pairs of elements as one, a single element.

    Each part says whether it is of pairs. A pair stands on a multiple of its own size, so arrays that are never aligned
    together stay one part of single elements, and so does float16.
    """
    count = arrays[0].numel()
    phases = {array.data_ptr() // array.itemsize % 2 for array in arrays}
    if len(phases) > 1 or any(array.dtype not in PAIR for array in arrays):
        return [(False, arrays)] if count else []
    head = min(phases.pop(), count)
    behind = head + (count - head) // 2 * 2
    cuts = (False, 0, head), (True, head, behind), (False, behind, count)
    return [
        (paired, tuple(_seen(array[begin:end], paired) for array in arrays))
        for paired, begin, end in cuts
        if begin < end
    ]


def _seen(array: torch.Tensor, paired: bool) -> torch.Tensor:
    return array.view(PAIR[array.dtype]) if paired else array


def in_groups(parts_of_all: Sequence[tuple[bool, Any]], most: int) -> list[tuple[bool, list[Any]]]:
    """The parts of one kind together, up to `most` in a group: what one launch has room for."""
    groups = []
    for paired in (True, False):
        alike = [arrays for kind, arrays in parts_of_all if kind is paired]
        groups += [(paired, alike[begin : begin + most]) for begin in range(0, len(alike), most)]
    return groups
