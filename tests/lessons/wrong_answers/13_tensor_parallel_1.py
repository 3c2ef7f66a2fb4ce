# Exercise 1 is wrong: chunks of ceil(size / ranks) are not even, and ranks are left without any.
# The checker says: 9, 8, 'column'), the weights: the result should have 8 entries, and has 5

import torch


def cut_linear(weight: torch.Tensor, bias: torch.Tensor, ranks: int, kind: str) -> tuple[list, list]:
    if kind == "column":
        return list(weight.chunk(ranks)), list(bias.chunk(ranks))
    return list(weight.chunk(ranks, dim=1)), [bias] + [None] * (ranks - 1)
