# Exercise 3 is wrong: upside down, which shows only where the efficiency is not 1.
# The checker says: efficiency([6, 6, 6], [4, 4, 4], 3): expected 0.5, got 2.0
import statistics


def efficiency(one: list[float], many: list[float], ranks: int) -> float:
    return statistics.median(many) * ranks / statistics.median(one)
