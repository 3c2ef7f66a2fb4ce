# Exercise 3 is wrong: a median for the ranks only, as if one device alone were never disturbed.
# The checker says: efficiency([8, 800, 8], [2, 2, 2], 4), with one sample that took a hundred times as long: expected
import statistics


def efficiency(one: list[float], many: list[float], ranks: int) -> float:
    return statistics.mean(one) / statistics.median(many) / ranks
