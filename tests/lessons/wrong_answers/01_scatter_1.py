# Exercise 1 is wrong: chunks of ceil(rows / ranks) leave ranks without any.
# The checker says: chunk_counts(9, 8): expected [2, 1, 1, 1, 1, 1, 1, 1], got [2, 2, 2, 2, 1, 0, 0, 0]


def chunk_counts(rows: int, ranks: int) -> list[int]:
    size = -(-rows // ranks)
    return [max(0, min(size, rows - rank * size)) for rank in range(ranks)]
