# Exercise 3 is wrong: it knows the wire of the page, and no other.
# The checker says: finish(ready=[100, 105], nbytes=[1000, 1000], latency=25, rate=100): expected 170, got 140


def finish(ready: list[int], nbytes: list[int], latency: int, rate: int) -> int:
    free = 0
    for at, each in zip(ready, nbytes, strict=True):
        free = max(free, at) + 10 + each // 100
    return free
