# Exercise 2 is wrong: backward takes the mean of the ranks' gradients; the gradient of copying is their sum.
# The checker says: expected float32 tensor [3.0, 3.0, 3.0, 3.0], got float32 tensor [1.5, 1.5, 1.5, 1.5]

import torch


class Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, ranks):
        return tuple(tensor.clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx, *grads):
        return sum(grads) / len(grads), None


def differentiable_copies(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    return Copies.apply(tensor, ranks)
