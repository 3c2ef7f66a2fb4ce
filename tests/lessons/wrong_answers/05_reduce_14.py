# Exercise 3 is wrong: everybody sends to rank 0, and nothing comes back: a reduce, not an all-reduce.
# The checker says: nbytes_sent('naive', 2, 480): expected [480, 480], got [0, 480]


def nbytes_sent(algorithm: str, ranks: int, nbytes: int) -> list[int]:
    if algorithm == "ring":
        return [2 * (ranks - 1) * nbytes // ranks] * ranks
    return [0] + [nbytes] * (ranks - 1)
