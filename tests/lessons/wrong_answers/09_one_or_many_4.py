# Exercise 2 is wrong: rounding down loses rows.
# The checker says: fair_counts(10, [1, 1, 1]): 9 of 10 rows are given away


def fair_counts(rows: int, speeds: list[int]) -> list[int]:
    return [rows * speed // sum(speeds) for speed in speeds]
