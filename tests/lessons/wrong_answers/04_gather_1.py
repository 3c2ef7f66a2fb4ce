# Exercise 1 is wrong: even chunks, instead of the rows that each rank had.
# The checker says: adjoint_of_gather(a (5, 3) tensor, [0, 4, 1]): [0] should have shape (0, 3), and has (2, 3)

from collections.abc import Sequence

import torch


def adjoint_of_gather(grad: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    return list(grad.tensor_split(len(counts)))
