# Exercise 3 is wrong: the softmax's denominator is taken for a constant; the value is right, its gradient is not.
# The checker says: labels=[[0, 1, 2, 3]]), the gradient of the logits: expected

from collections.abc import Sequence

import torch


def team_cross_entropy(logits: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> torch.Tensor:
    x, y = torch.cat(list(logits)), torch.cat(list(labels))
    x, y = x[y != -100], y[y != -100]
    denominators = x.detach().logsumexp(dim=1)
    return (denominators - x.gather(1, y.unsqueeze(1)).squeeze(1)).mean()
