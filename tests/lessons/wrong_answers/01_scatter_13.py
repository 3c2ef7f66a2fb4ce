# Exercise 3 is wrong: the error names no key, although its words have all letters of short ones, such as x and y.
# The checker says: two that disagree, and says 'expected every tensor to have the same number of rows, not 6, 5, 5'

import torch


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    cut = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    first, *others = cut
    if any(len(cut[other]) != len(cut[first]) for other in others):
        counts = ", ".join(str(len(value)) for value in cut.values())
        raise ValueError(f"expected every tensor to have the same number of rows, not {counts}")
    parts: list[dict[str, object]] = []
    for chosen in torch.arange(len(cut[first])).tensor_split(min(ranks, len(cut[first]))):
        whole = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        parts.append({key: value[chosen] if key in cut else value for key, value in whole.items()})
    return parts
