# Exercise 3 is wrong: a part ends when it has reached the mean, so the last one gets what is left, or nothing.
# The checker says: best_cut([1, 1, 1, 9], 2): expected a list of 1 begins, got []

from collections.abc import Sequence

Action = tuple[int, int, str, int]


def best_cut(costs: Sequence[int], parts: int) -> list[int]:
    found, filled = [], 0
    for layer, cost in enumerate(costs):
        filled += cost
        if filled >= sum(costs) / parts and len(found) < parts - 1 and layer + 1 < len(costs):
            found.append(layer + 1)
            filled = 0
    return found
