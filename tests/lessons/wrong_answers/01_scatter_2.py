# Exercise 1 is wrong: the last rank gets the whole remainder, which may be nearly twice what the others have.
# The checker says: chunk_counts(9, 8): expected [2, 1, 1, 1, 1, 1, 1, 1], got [1, 1, 1, 1, 1, 1, 1, 2]


def chunk_counts(rows: int, ranks: int) -> list[int]:
    counts = [rows // ranks] * ranks
    counts[-1] += rows % ranks
    return counts
