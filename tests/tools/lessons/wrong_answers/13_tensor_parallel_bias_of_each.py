# Exercise 2 is wrong: each rank adds the bias before the sum.
# The checker says: cut_mlp(x, 2 ups, 2 downs, bias, all_reduce): expected

import torch


def cut_mlp(x: torch.Tensor, ups: list, downs: list, bias: torch.Tensor, all_reduce) -> torch.Tensor:
    return all_reduce([(x @ up.T).relu() @ down.T + bias for up, down in zip(ups, downs, strict=True)])
