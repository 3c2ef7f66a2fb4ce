"""Lesson 8, choosing devices: the solution."""

from collections.abc import Sequence


def visible(mask: str | None, count: int) -> list[int]:
    """First the text, as it is written, then the cards that there are: as the driver reads it."""
    if mask is None:
        return list(range(count))
    written: list[int] = []
    for entry in mask.split(","):
        if not entry or int(entry) < 0:
            break
        if int(entry) in written:
            return []
        written.append(int(entry))
    wrong = next(
        (index for index, card in enumerate(written) if card >= count), len(written)
    )
    return written[:wrong]


def mask_for(cards: Sequence[int]) -> str:
    """Numbers and commas; without any, a number that no card has."""
    return ",".join(map(str, cards)) or "-1"


def ranks_on(device_ids: Sequence[str]) -> dict[str, list[int]]:
    """A rank is an index into the list."""
    found: dict[str, list[int]] = {}
    for rank, device in enumerate(device_ids):
        found.setdefault(device, []).append(rank)
    return found
