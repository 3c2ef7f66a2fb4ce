# Exercise 2 is wrong: one clone, cut into views: a rank that keeps its part keeps the memory of all parts.
# The checker says: each of the 8 parts should have memory of its own, and they are views of 1

import torch


def scatter_rows(tensor: torch.Tensor, ranks: int, dim: int = 0) -> list[torch.Tensor]:
    rows, small = tensor.size(dim), tensor.size(dim) // ranks
    counts = [small + (rank < rows % ranks) for rank in range(ranks)]
    return [part.contiguous() for part in tensor.clone().split([count for count in counts if count] or [0], dim)]
