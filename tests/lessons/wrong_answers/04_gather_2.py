# Exercise 1 is wrong: every rank gets the whole gradient, as in the backward of a reduce.
# The checker says: adjoint_of_gather(a (5, 3) tensor, [3, 2]): [0] should have shape (3, 3), and has (5, 3)

from collections.abc import Sequence

import torch


def adjoint_of_gather(grad: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    return [grad.clone() for _ in counts]
