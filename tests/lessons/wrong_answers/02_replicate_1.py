# Exercise 1 is wrong: the bucket is closed after it has passed the limit, one tensor too late.
# The checker says: bucket_positions([4, 4, 4], [0, 0, 0], 8): expected [[0, 1], [2]], got [[0, 1, 2]]

from collections.abc import Sequence


def bucket_positions(nbytes: Sequence[int], kinds: Sequence[int], limit: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    filled = limit + 1
    for i, each in enumerate(nbytes):
        if filled > limit or kinds[i] != kinds[i - 1]:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += each
    return buckets
