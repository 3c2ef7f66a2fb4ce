# Exercise 2 is wrong: the hidden features travel, too, although each rank has what it needs.
# The checker says: all_reduce should be called once with 1 tensors; its calls had [1, 1]

import torch


def cut_mlp(x: torch.Tensor, ups: list, downs: list, bias: torch.Tensor, all_reduce) -> torch.Tensor:
    counts = [len(up) for up in ups]
    spread = [[torch.zeros(len(x), count, dtype=x.dtype) for count in counts] for _ in ups]
    for rank, up in enumerate(ups):
        spread[rank][rank] = x @ up.T
    hidden = all_reduce([torch.cat(parts, dim=1) for parts in spread]).relu().split(counts, dim=1)
    return all_reduce([part @ down.T for part, down in zip(hidden, downs, strict=True)]) + bias
