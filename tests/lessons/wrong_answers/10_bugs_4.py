# Exercise 2 is wrong: it adds into the first rank's own gradient.
# The checker says: the gradients of rank 0 have changed
import torch


def sum_gradients(columns: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    sums: list[torch.Tensor | None] = []
    for row in zip(*columns, strict=True):
        present = [gradient for gradient in row if gradient is not None]
        total = present[0] if present else None
        for gradient in present[1:]:
            total += gradient
        sums.append(total)
    return sums
