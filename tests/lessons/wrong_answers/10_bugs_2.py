# Exercise 1 is wrong: a rank without rows makes everything nan.
# The checker says: batch_loss([2.0, nan], [4, 0]): expected 2.0, got nan


def batch_loss(losses: list[float], rows: list[int]) -> float:
    return sum(loss * count for loss, count in zip(losses, rows, strict=True)) / sum(rows)
