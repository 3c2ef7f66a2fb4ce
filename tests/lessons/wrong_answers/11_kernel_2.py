# Exercise 1 is wrong: it counts bytes, as if every sector were used whole.
# The checker says: sectors([28], 16): expected 2, got 1


def sectors(addresses: list[int], nbytes: int) -> int:
    return (len(addresses) * nbytes + 31) // 32
