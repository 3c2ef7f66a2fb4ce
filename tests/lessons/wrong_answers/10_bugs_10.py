# Exercise 2 is wrong: where one rank alone has a gradient, that very tensor is the sum.
# The checker says: a write into a sum changes a gradient; a sum should be a fresh tensor
import torch


def sum_gradients(columns: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    sums: list[torch.Tensor | None] = []
    for row in zip(*columns, strict=True):
        total = None
        for gradient in row:
            if gradient is not None:
                total = gradient if total is None else total + gradient
        sums.append(total)
    return sums
