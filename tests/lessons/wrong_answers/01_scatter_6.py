# Exercise 2 is wrong: turned so that dim comes first, cut, and turned back, so each part has the strides of the turned.
# The checker says: scatter_rows(a (3, 9) tensor, 8, 1): the part of rank 0 is not contiguous, its strides are (1, 3)

import torch


def scatter_rows(tensor: torch.Tensor, ranks: int, dim: int = 0) -> list[torch.Tensor]:
    turned = tensor.transpose(0, dim).contiguous()
    parts = turned.tensor_split(min(ranks, len(turned)) or 1)
    return [part.clone().transpose(0, dim) for part in parts]
