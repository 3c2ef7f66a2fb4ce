"""Which tensors travel together.

Many small messages cost more than one large one, and a gradient that is ready should not wait for one that is not: so
tensors go in buckets of neighbours of one dtype, of up to 10 MiB, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from mgpu_core import _core

__all__ = ["DEFAULT_NBYTES", "bucket_positions"]

DEFAULT_NBYTES = 10 * 1024 * 1024


@lru_cache(maxsize=64)
def _plan(nbytes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], limit_nbytes: int) -> list[list[int]]:
    numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(dtypes))}
    return _core.bucket_plan(list(nbytes), [numbers[dtype] for dtype in dtypes], limit_nbytes)


def bucket_positions(tensors: Sequence[torch.Tensor], limit_nbytes: int = DEFAULT_NBYTES) -> list[list[int]]:
    """Return the positions of the tensors of each bucket, in order.  The plan is kept by sizes and dtypes.

    Raises:
        ValueError: a limit that is not positive.
    """
    nbytes = tuple([tensor.nbytes if tensor.layout is torch.strided else 0 for tensor in tensors])
    return _plan(nbytes, tuple([tensor.dtype for tensor in tensors]), limit_nbytes)
