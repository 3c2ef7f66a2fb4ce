# Exercise 1 is wrong: it looks at the first byte of each load only.
# The checker says: sectors([28], 16): expected 2, got 1


def sectors(addresses: list[int], nbytes: int) -> int:
    return len({address // 32 for address in addresses})
