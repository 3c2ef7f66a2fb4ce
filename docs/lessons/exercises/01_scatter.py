"""Lesson 1, scatter: write the three functions, then run `mgpu lesson check 1`.

Plain torch is all you need.
"""

import torch


def chunk_counts(rows: int, ranks: int) -> list[int]:
    """How many rows each rank gets: one number per rank, zeros included.

    Sizes differ by at most one, and the larger ones come first: chunk_counts(9, 4) is [3, 2, 2, 2], and
    chunk_counts(3, 4) is [1, 1, 1, 0].
    """
    raise NotImplementedError


def scatter_rows(tensor: torch.Tensor, ranks: int, dim: int = 0) -> list[torch.Tensor]:
    """The tensor cut along `dim` into one part per rank, with as many rows as `chunk_counts` says.

    Ranks that would get nothing are left out; of a tensor without rows, rank 0 gets an empty part.  Each part is
    contiguous, in memory of its own, which it shares with no other part: a write into it must not change the tensor,
    also when there is one rank.
    """
    raise NotImplementedError


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    """One dictionary per rank that has rows, with the keys of the batch in their order.

    Tensors are cut along dimension 0, all at the same rows; a tensor without dimensions is cloned for every rank;
    anything else goes to every rank as it is.  At least one tensor has rows.  Tensors that disagree on how many raise a
    ValueError whose text has the keys of two that disagree.
    """
    raise NotImplementedError
