# Exercise 2 is wrong: a vector of four items, right for float32 alone.
# The checker says: split(0, 5, 1): expected (0, 0, 5), got (0, 4, 1)


def split(address: int, count: int, itemsize: int) -> tuple[int, int, int]:
    head = min(count, -address % 16 // itemsize)
    body = (count - head) // 4 * 4
    return head, body, count - head - body
