# Exercise 3 is wrong: one slow sample spoils a mean.
# The checker says: with one sample that took a hundred times as long
import statistics


def efficiency(one: list[float], many: list[float], ranks: int) -> float:
    return statistics.mean(one) / statistics.mean(many) / ranks
