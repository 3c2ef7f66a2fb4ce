# Exercise 2 is wrong: a bucket that never becomes complete is added at the end.
# The checker says: complete_buckets([], {0: 0}, 1): expected [], got [0]

from collections import Counter
from collections.abc import Mapping, Sequence


def complete_buckets(events: Sequence[tuple[int, int]], bucket_of: Mapping[int, int], ranks: int) -> list[int]:
    missing = {bucket: ranks * count for bucket, count in Counter(bucket_of.values()).items()}
    found = []
    for _, parameter in events:
        bucket = bucket_of[parameter]
        missing[bucket] -= 1
        if missing[bucket] == 0:
            found.append(bucket)
    return found + [bucket for bucket in missing if bucket not in found]
