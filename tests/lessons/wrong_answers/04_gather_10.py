# Exercise 3 is wrong: item() gives the right number, without a graph.
# The checker says: labels=[[0, 1, 2, 3]]): the result has no history, so no gradient can come back

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy


def team_cross_entropy(logits: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> torch.Tensor:
    total = sum(cross_entropy(x, y, reduction="sum").item() for x, y in zip(logits, labels, strict=True))
    return torch.tensor(total / sum(int((y != -100).sum()) for y in labels), dtype=logits[0].dtype)
