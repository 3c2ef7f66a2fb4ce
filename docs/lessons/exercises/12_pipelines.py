"""Lesson 12, pipelines: write the three functions, then run `mgpu lesson check 12`.

Plain Python is all you need.
"""

from collections.abc import Sequence

Action = tuple[int, int, str, int]
"""(slot, stage, "F" for a forward or "B" for a backward, micro-batch), each counted from 0."""


def gpipe(stages: int, chunks: int) -> list[Action]:
    """All forwards, each as early as it can be, and then all backwards: the last micro-batch goes back first.

    A stage has one action a slot.  A forward comes after that of the stage before; a backward after that of the stage
    behind, and at the last stage after all forwards.  The actions are sorted.
    """
    raise NotImplementedError


def most_kept(actions: Sequence[Action], stage: int) -> int:
    """The most micro-batches that a stage keeps at a time: one is kept from its forward to its backward.

    The actions may be in any order.  A micro-batch that never goes back is kept for ever.
    """
    raise NotImplementedError


def best_cut(costs: Sequence[int], parts: int) -> list[int]:
    """Where the parts after the first begin, so that the most expensive part costs least.

    No part is empty.  Of several best cuts any will do.  There may be 60 layers and 8 parts.
    """
    raise NotImplementedError
