# Exercise 2 is wrong: the exact shares; but there are no fractions of rows.
# The checker says: fair_counts(100, [2, 2, 1]): expected 3 whole numbers, got [40.0, 40.0, 20.0]


def fair_counts(rows: int, speeds: list[int]) -> list[int]:
    return [rows * speed / sum(speeds) for speed in speeds]
