# Exercise 2 is wrong: one copy, which all ranks share: the first that writes into it writes for all.
# The checker says: differentiable_copies(tensor, 2): two of the copies and the tensor share their memory

import torch


def differentiable_copies(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    return (tensor.clone(),) * ranks
