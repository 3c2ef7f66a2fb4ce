"""Where to cut a list of layers, so that the largest part is as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["best_cut"]


def best_cut(costs: Sequence[float], parts: int) -> list[int]:
    """Return where parts after the first begin, so that the largest sum of a part is least; none is empty.

    Dynamic programming over the positions of the last cut.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    # best[end]: the largest sum with the first `end` layers in as many parts as there are so far, and their cuts
    best: dict[int, tuple[float, list[int]]] = {end: (sums[end], []) for end in range(1, count + 1)}
    for part in range(2, parts + 1):
        best = {
            end: min((max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], cut]) for cut in range(part - 1, end))
            for end in range(part, count + 1)
        }
    return best[count][1]
