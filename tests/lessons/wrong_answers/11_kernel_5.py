# Exercise 3 is wrong: a pass also reads the total, and it was forgotten.
# The checker says: moved_nbytes(2, 8, False): expected 24, got 16


def moved_nbytes(ranks: int, nbytes: int, fused: bool) -> int:
    if ranks == 1:
        return 0
    return (ranks + 1 if fused else 2 * (ranks - 1)) * nbytes
