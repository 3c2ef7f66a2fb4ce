"""Lesson 8, choosing devices: the solution."""

from collections.abc import Sequence


def visible(mask: str | None, count: int) -> list[int]:
    """Entry by entry, as the driver reads it."""
    if mask is None:
        return list(range(count))
    entries, found = mask.split(","), []
    if len(set(entries)) < len(entries):
        return []
    for entry in entries:
        if not entry or not 0 <= int(entry) < count:
            break
        found.append(int(entry))
    return found


def mask_for(cards: Sequence[int]) -> str:
    """Numbers and commas; without any, a number that no card has."""
    return ",".join(map(str, cards)) or "-1"


def ranks_on(device_ids: Sequence[str]) -> dict[str, list[int]]:
    """A rank is a place in the list."""
    found: dict[str, list[int]] = {}
    for rank, device in enumerate(device_ids):
        found.setdefault(device, []).append(rank)
    return found
