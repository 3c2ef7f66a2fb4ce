"""Lesson 13, tensor parallel: write the three functions, then run `mgpu lesson check 13`.

Plain torch is all you need.
"""

from collections.abc import Callable, Sequence

import torch


def cut_linear(
    weight: torch.Tensor, bias: torch.Tensor, ranks: int, kind: str
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The weights and the biases of the ranks, from those of an nn.Linear: weight is (out, in), bias is (out,).

    The kind is "column" or "row".  Sizes differ by at most one, and the first ranks have more.  In a row layer the
    first rank alone adds the bias; the others have None.
    """
    raise NotImplementedError


def cut_mlp(
    x: torch.Tensor,
    ups: Sequence[torch.Tensor],
    downs: Sequence[torch.Tensor],
    bias: torch.Tensor,
    all_reduce: Callable[[list[torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    """The output of linear(relu(linear(x, up)), down, bias), from the parts of both weights.

    ups[rank] are rows of the first weight, downs[rank] columns of the second.  `all_reduce` takes one tensor per rank
    and returns their sum, which every rank then has; call it once.
    """
    raise NotImplementedError


def cut_lookup(
    tokens: torch.Tensor, shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What each rank adds: the sum over the ranks is embedding(tokens, torch.cat(shards)).

    Rank r has the rows of the next len(shards[r]) tokens, and looks only into shards[r].  It adds zeros for tokens of
    other ranks.  The tokens have one dimension.
    """
    raise NotImplementedError
