"""What a kernel does with a pair: two float32 out of an int64 and back, by their bits."""
# mypy: disable-error-code="untyped-decorator"

from typing import Any

import numpy as np

from benchmarks.ladder.numba_rungs.launches import cuda


@cuda.jit(device=True)
def low(word: Any) -> Any:
    """The float32 that stands first in memory: the low 32 bits."""
    return np.uint32(word & 0xFFFFFFFF).view(np.float32)


@cuda.jit(device=True)
def high(word: Any) -> Any:
    """The one behind it."""
    return np.uint32((word >> 32) & 0xFFFFFFFF).view(np.float32)


@cuda.jit(device=True)
def word_of(first: Any, second: Any) -> Any:
    """Both as one int64."""
    return np.int64(first.view(np.uint32)) | (np.int64(second.view(np.uint32)) << np.int64(32))
