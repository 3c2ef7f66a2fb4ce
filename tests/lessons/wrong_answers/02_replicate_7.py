# Exercise 2 is wrong: repeat puts the copies one behind the other in one long tensor, and cuts nothing.
# The checker says: differentiable_copies(tensor, 1): the result should have 1 entries, and has 4

import torch


def differentiable_copies(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.repeat(ranks))
