"""Lesson 10, the gallery of bugs: write the three functions, then run `mgpu lesson check 10`.

Plain torch is all you need.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def batch_loss(losses: Sequence[float], rows: Sequence[int]) -> float:
    """The mean loss over all rows, from each rank's mean over its own rows.

    Ranks may have no rows; their loss is then `nan` and counts for nothing.  There is at least one row.
    """
    raise NotImplementedError


def sum_gradients(
    columns: Sequence[Sequence[torch.Tensor | None]],
) -> list[torch.Tensor | None]:
    """`columns[rank][i]` is the gradient of parameter i on that rank; returns the sums over the ranks, in rank order.

    `None` adds nothing; what no rank has is `None`.  The sums are fresh tensors: no gradient is changed or returned.
    """
    raise NotImplementedError


def call_in_thread(function: Callable[[], Any]) -> Any:
    """What `function()` returns, run in a new thread that has ended when this returns.

    It computes as it would here: under the caller's autocast (device type "cpu": on or off, and its dtype) and grad
    mode.  An exception of the function is raised here.
    """
    raise NotImplementedError
