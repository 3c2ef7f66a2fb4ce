# Exercise 2 is wrong: a mean of means.
# The checker says: team_mean(means=[2.0, 4.5], rows=[3, 2]): expected float64 tensor 3.0, got float64 tensor 3.25

from collections.abc import Sequence

import torch


def team_mean(means: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    return torch.stack(list(means)).mean()
