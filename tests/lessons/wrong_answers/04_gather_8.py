# Exercise 2 is wrong: a number, and not a tensor.
# The checker says: team_mean(means=[2.5], rows=[4]): expected a tensor, got 2.5

from collections.abc import Sequence

import torch


def team_mean(means: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    return sum(mean.item() * count for mean, count in zip(means, rows, strict=True) if count) / sum(rows)
