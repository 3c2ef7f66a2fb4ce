# Exercise 1 is wrong: a wrong entry is skipped, but the driver stops there.
# The checker says: visible('1,9,2', 4): expected [1], got [1, 2]


def visible(mask: str | None, count: int) -> list[int]:
    if mask is None:
        return list(range(count))
    found = [int(entry) for entry in mask.split(",") if entry and 0 <= int(entry) < count]
    return [] if len(set(found)) < len(found) else found
