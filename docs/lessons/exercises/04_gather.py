"""Lesson 4, gather: write the three functions, then run `mgpu lesson check 4`.

Plain torch is all you need.
"""

from collections.abc import Sequence

import torch


def adjoint_of_gather(grad: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """The gradient of each rank's output, from the gradient of the gathered one.

    Rank r had counts[r] rows, which may be none.  Rank r's gradient has as many rows, also if there are none.
    """
    raise NotImplementedError


def team_mean(means: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """The mean loss over all rows, as a scalar, from the mean loss of each rank over its own rows.

    Differentiable: the gradients of the means are those that one device's loss would give them.  A rank with 0 rows
    has a mean that is nan, and must change nothing.  At least one rank has rows.
    """
    raise NotImplementedError


def team_cross_entropy(
    logits: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
) -> torch.Tensor:
    """torch's cross_entropy of all rows together, from the logits and labels of each rank; differentiable.

    Labels that are -100 are ignored, and do not count in the mean.  Some ranks may have nothing but those.
    """
    raise NotImplementedError
