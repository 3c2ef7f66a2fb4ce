# Exercise 2 is wrong: the actions are taken in the order in which they come.
# The checker says: expected 1, got 0

from collections.abc import Sequence

Action = tuple[int, int, str, int]


def most_kept(actions: Sequence[Action], stage: int) -> int:
    kept = most = 0
    for _, where, kind, _ in actions:
        if where == stage:
            kept += 1 if kind == "F" else -1
            most = max(most, kept)
    return most
