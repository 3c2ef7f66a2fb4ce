# Exercise 3 is wrong: in the tree, ranks between the root and the leaves send downwards, too.
# The checker says: nbytes_sent('tree', 4, 480): expected [960, 480, 960, 480], got [960, 480, 480, 480]


def nbytes_sent(algorithm: str, ranks: int, nbytes: int) -> list[int]:
    if algorithm == "ring":
        return [2 * (ranks - 1) * nbytes // ranks] * ranks
    of_root = ranks - 1 if algorithm == "naive" else (ranks - 1).bit_length()
    return [of_root * nbytes] + [nbytes] * (ranks - 1)
