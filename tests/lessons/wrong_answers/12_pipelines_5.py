# Exercise 2 is wrong: it counts the micro-batches of all stages.
# The checker says: expected 0, got 1

from collections.abc import Sequence

Action = tuple[int, int, str, int]


def most_kept(actions: Sequence[Action], stage: int) -> int:
    kept = most = 0
    for _, _, kind, _ in sorted(actions):
        kept += 1 if kind == "F" else -1
        most = max(most, kept)
    return most
