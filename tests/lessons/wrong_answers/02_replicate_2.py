# Exercise 1 is wrong: kinds are forgotten, so float32 and float16 would share one flat bucket.
# The checker says: bucket_positions([4, 4, 4], [0, 1, 0], 100): expected [[0], [1], [2]], got [[0, 1, 2]]

from collections.abc import Sequence


def bucket_positions(nbytes: Sequence[int], kinds: Sequence[int], limit: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    filled = 0
    for i, each in enumerate(nbytes):
        if not buckets or filled + each > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += each
    return buckets
