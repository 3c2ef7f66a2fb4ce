# Exercise 1 is wrong: it looks at the last bucket alone, which may have to wait for those before it.
# The checker says: exposed([2.0, 4.0, 6.0], [3.0, 3.0, 3.0], 6.0): expected 5.0, got 3.0


def exposed(ready: list[float], taken: list[float], backward: float) -> float:
    return max(0.0, ready[-1] + taken[-1] - backward) if ready else 0.0
