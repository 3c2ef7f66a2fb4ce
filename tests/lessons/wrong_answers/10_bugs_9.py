# Exercise 2 is wrong: a parameter that only some ranks have used gets no gradient at all.
# The checker says: 2 ranks and 3 parameters: parameter 2: expected float32 tensor [5.0, 6.0], got None
import torch


def sum_gradients(columns: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    return [
        None if any(gradient is None for gradient in row) else torch.stack(row).sum(dim=0)
        for row in zip(*columns, strict=True)
    ]
