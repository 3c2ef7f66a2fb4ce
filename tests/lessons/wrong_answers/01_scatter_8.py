# Exercise 3 is wrong: a deep copy of everything for every rank, also of what is no tensor.
# The checker says: rank 0 should get the list itself, not a copy

import copy

import torch


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    rows = next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())
    parts = [copy.deepcopy(batch) for _ in range(min(ranks, rows))]
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim():
            for part, piece in zip(parts, value.tensor_split(len(parts)), strict=True):
                part[key] = piece.clone()
    return parts
