# Exercise 2 is wrong: one sum per rank over its parameters, instead of one per parameter over the ranks.
# The checker says: sum_gradients of 2 ranks and 3 parameters: expected a list of 3, got [
import torch


def sum_gradients(columns: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    return [sum(gradient for gradient in column if gradient is not None) for column in columns]
