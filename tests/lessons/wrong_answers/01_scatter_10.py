# Exercise 3 is wrong: the error says that something is wrong with the batch, but not where.
# The checker says: name the keys of two that disagree, and says 'different numbers of rows: 6, 5, 5'

import torch


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    cut = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    rows = [len(value) for value in cut.values()]
    if len(set(rows)) > 1:
        raise ValueError(f"different numbers of rows: {', '.join(map(str, rows))}")
    parts: list[dict[str, object]] = []
    for chosen in torch.arange(rows[0]).tensor_split(min(ranks, rows[0])):
        whole = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        parts.append({key: value[chosen] if key in cut else value for key, value in whole.items()})
    return parts
