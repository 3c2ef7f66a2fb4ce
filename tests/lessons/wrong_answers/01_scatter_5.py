# Exercise 3 is wrong: zip stops at the shortest, so rows are dropped without a word.
# The checker says: {'name': 'odd', 'pixels': 6 rows, 'labels': 5 rows, 'weights': 5 rows}, 2): expected a ValueError

import torch


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    rows = min(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())
    rows_of_ranks = [part for part in torch.arange(rows).tensor_split(ranks) if len(part)]
    parts = []
    for chosen in rows_of_ranks:
        part = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                value = value[chosen] if value.dim() else value.clone()
            part[key] = value
        parts.append(part)
    return parts
