# Exercise 1 is wrong: it adds up all communication, as if none were hidden.
# The checker says: exposed([2.0, 4.0, 6.0], [1.0, 1.0, 1.0], 6.0): expected 1.0, got 3.0


def exposed(ready: list[float], taken: list[float], backward: float) -> float:
    return sum(taken)
