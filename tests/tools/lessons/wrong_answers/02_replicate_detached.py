# Exercise 2 is wrong: detach cuts the history, so the net learns nothing.
# The checker says: the copies have no history, so no gradient can come back

import torch


def differentiable_copies(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().clone() for _ in range(ranks))
