# Exercise 2 is wrong: it looks at rank 0 alone, and sums gradients that other ranks do not have yet.
# The checker says: complete_buckets(

from collections import Counter
from collections.abc import Mapping, Sequence


def complete_buckets(events: Sequence[tuple[int, int]], bucket_of: Mapping[int, int], ranks: int) -> list[int]:
    missing = Counter(bucket_of.values())
    found = []
    for rank, parameter in events:
        if rank == 0:
            bucket = bucket_of[parameter]
            missing[bucket] -= 1
            if missing[bucket] == 0:
                found.append(bucket)
    return found
