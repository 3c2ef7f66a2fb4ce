# Exercise 3 is wrong: the weights are right, but a rank without labels makes all of it nan.
# The checker says: got float64 tensor nan

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy


def team_cross_entropy(logits: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> torch.Tensor:
    kept = [(y != -100).sum() for y in labels]
    means = [cross_entropy(x, y) * count for x, y, count in zip(logits, labels, kept, strict=True)]
    return torch.stack(means).sum() / sum(kept)
