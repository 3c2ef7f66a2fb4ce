"""Lesson 8, choosing devices: write the three functions, then run `mgpu lesson check 8`.

Plain Python is all you need.
"""

from collections.abc import Sequence


def visible(mask: str | None, count: int) -> list[int]:
    """Which of a machine's cards 0 ... count - 1 a process sees, in its own order: the first is its cuda:0.

    `mask` is the value of CUDA_VISIBLE_DEVICES, None if it is not set; only numbers come, with a comma between them.
    The first entry that is no card of the machine (a negative number, one that is too large, an empty text) ends the
    list.  A number that comes twice before a negative or empty entry, too large or not, hides everything.
    """
    raise NotImplementedError


def mask_for(cards: Sequence[int]) -> str:
    """The mask under which cuda:0, cuda:1, ... are these cards; of no cards, one that hides everything."""
    raise NotImplementedError


def ranks_on(device_ids: Sequence[str]) -> dict[str, list[int]]:
    """Of each device the ranks that work on it, in rank order; devices in the order in which they first come."""
    raise NotImplementedError
