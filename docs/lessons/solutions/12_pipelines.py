"""Lesson 12, pipelines: a solution."""

from collections.abc import Sequence

Action = tuple[int, int, str, int]


def gpipe(stages: int, chunks: int) -> list[Action]:
    """The backwards are the forwards in a mirror."""
    forwards = [
        (stage + batch, stage, "F", batch)
        for stage in range(stages)
        for batch in range(chunks)
    ]
    end = 2 * (stages + chunks - 1) - 1
    return sorted(
        forwards
        + [(end - slot, stage, "B", batch) for slot, stage, _, batch in forwards]
    )


def most_kept(actions: Sequence[Action], stage: int) -> int:
    """In the order of the slots, up and down."""
    kept = most = 0
    for _, where, kind, _ in sorted(actions):
        if where == stage:
            kept += 1 if kind == "F" else -1
            most = max(most, kept)
    return most


def best_cut(costs: Sequence[int], parts: int) -> list[int]:
    """For each number of layers and of parts, the best position of the last cut."""
    best = {end: (sum(costs[:end]), []) for end in range(1, len(costs) + 1)}
    for part in range(2, parts + 1):
        best = {
            end: min(
                (max(best[cut][0], sum(costs[cut:end])), [*best[cut][1], cut])
                for cut in range(part - 1, end)
            )
            for end in range(part, len(costs) + 1)
        }
    return best[len(costs)][1]
