"""From which batch on many ranks beat one device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["BreakEven", "break_even"]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where the best of the other ways begins to beat one device, and goes on to do so.

    Attributes:
        kind: ``at`` about so many rows; ``below`` the smallest batch measured; ``none`` up to the largest;
            ``unknown``: nothing could be compared.
        rows: of that batch; between two that were measured, on a line over the logarithm of the rows.
    """

    kind: str
    rows: float | None = None

    def __str__(self) -> str:
        return {
            "at": f"about {round(self.rows or 0)} rows: from there on the best other way beats one device",
            "below": f"below {round(self.rows or 0)} rows, the smallest batch measured",
            "none": f"none up to {round(self.rows or 0)} rows",
            "unknown": "unknown: one device could not be compared with another way",
        }[self.kind]


def break_even(speedups: Mapping[int, float]) -> BreakEven:
    """From the best speed-up over one device at each batch.

    A batch beyond which all measured ones are faster counts; one faster batch among slower ones does not.
    """
    if not speedups:
        return BreakEven("unknown")
    rows = sorted(speedups)
    slower = [index for index, each in enumerate(rows) if speedups[each] <= 1]
    if not slower:
        return BreakEven("below", float(rows[0]))
    last = slower[-1]
    if last == len(rows) - 1:
        return BreakEven("none", float(rows[-1]))
    one, two = rows[last], rows[last + 1]
    part = (1 - speedups[one]) / (speedups[two] - speedups[one])
    return BreakEven("at", math.exp(math.log(one) + part * (math.log(two) - math.log(one))))
