# Exercise 1 is wrong: the weight is cut as the literature writes it, (in, out), and not as torch keeps it.
# The checker says: 9, 2, 'column'), the weights: [0] should have shape (5, 11), and has (9, 6)

import torch


def cut_linear(weight: torch.Tensor, bias: torch.Tensor, ranks: int, kind: str) -> tuple[list, list]:
    if kind == "column":
        return list(weight.tensor_split(ranks, dim=1)), list(bias.tensor_split(ranks))
    return list(weight.tensor_split(ranks)), [bias] + [None] * (ranks - 1)
