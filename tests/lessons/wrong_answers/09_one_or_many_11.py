# Exercise 2 is wrong: what is left goes to the largest remainders, and one row more costs a slow device more.
# The checker says: fair_counts(2, [1, 3]): the slowest of [1, 1] takes 1, and 0.666667 can be reached


def fair_counts(rows: int, speeds: list[int]) -> list[int]:
    exact = [rows * speed / sum(speeds) for speed in speeds]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda rank: counts[rank] - exact[rank])
    for rank in by_remainder[: rows - sum(counts)]:
        counts[rank] += 1
    return counts
