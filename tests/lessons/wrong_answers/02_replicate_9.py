# Exercise 2 is wrong: where one copy was not used, backward gives up, and the gradients of the others are lost too.
# The checker says: differentiable_copies(tensor, 2), the tensor's gradient with ranks [1] used: expected float32 tensor

import torch


class Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx, *grads):
        if any(grad is None for grad in grads):
            return None, None
        return sum(grads), None


def differentiable_copies(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    return Copies.apply(tensor, ranks)
