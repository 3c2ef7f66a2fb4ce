# Exercise 1 is wrong: it sorts, but the mask is also an order.
# The checker says: visible('2,0', 4): expected [2, 0], got [0, 2]


def visible(mask: str | None, count: int) -> list[int]:
    if mask is None:
        return list(range(count))
    entries, found = mask.split(","), []
    for entry in entries:
        if not entry or not 0 <= int(entry) < count or len(set(entries)) < len(entries):
            break
        found.append(int(entry))
    return sorted(found)
