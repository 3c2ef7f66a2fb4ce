# Exercise 2 is wrong: it counts the forwards, of which backwards free none.
# The checker says: expected 1, got 2

from collections.abc import Sequence

Action = tuple[int, int, str, int]


def most_kept(actions: Sequence[Action], stage: int) -> int:
    return sum(where == stage and kind == "F" for _, where, kind, _ in actions)
