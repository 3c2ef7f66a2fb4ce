# Exercise 3 is wrong: it compares the first two tensors alone, and the rows of a third are dropped or missing.
# The checker says: 'pixels': 6 rows, 'labels': 6 rows, 'weights': 5 rows}, 2): expected a ValueError

import torch


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    cut = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    first, second, *_ = cut
    if len(cut[first]) != len(cut[second]):
        raise ValueError(f"{first} has {len(cut[first])} rows, and {second} has {len(cut[second])}")
    rows = len(cut[first])
    parts: list[dict[str, object]] = []
    for chosen in torch.arange(rows).tensor_split(min(ranks, rows)):
        begin, end = int(chosen[0]), int(chosen[-1]) + 1
        whole = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        parts.append({key: value[begin:end] if key in cut else value for key, value in whole.items()})
    return parts
