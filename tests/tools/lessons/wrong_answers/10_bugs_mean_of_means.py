# Exercise 1 is wrong: the mean of means.
# The checker says: batch_loss([0.0, 7.5], [3, 2]): expected 3.0, got 3.75


def batch_loss(losses: list[float], rows: list[int]) -> float:
    return sum(losses) / len(losses)
