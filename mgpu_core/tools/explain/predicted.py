"""The cost model's prediction for a recorded collective, to show next to the measured time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgpu_core.tools.explain.cost import (
    ALGORITHMS,
    all_reduce_seconds,
    broadcast_seconds,
    gather_seconds,
    reduce_seconds,
    scatter_seconds,
)
from mgpu_core.tools.explain.topology import Machine
from mgpu_core.trace.events import Collective

__all__ = ["predicted_seconds"]

_FORMULAS: dict[str, tuple[Callable[[int, float, Machine], float], Callable[[Sequence[int]], int]]] = {
    "broadcast": (broadcast_seconds, max),
    "reduce": (reduce_seconds, max),
    "scatter": (scatter_seconds, sum),
    "gather": (gather_seconds, sum),
}
"""Of an operation: its seconds, and which bytes count: of the largest rank, or of all together."""


def predicted_seconds(calls: Sequence[Collective], machine: Machine | None) -> float | None:
    """Return the seconds of all calls, one after another; ``None`` without a machine or a formula."""
    if machine is None or not calls:
        return None
    found = [_of(call, machine) for call in calls]
    return None if any(each is None for each in found) else sum(each for each in found if each is not None)


def _of(call: Collective, machine: Machine) -> float | None:
    ranks = len(call.ranks)
    if ranks < 2 or call.route == "generic":
        return None
    if call.operation == "all_reduce":
        algorithm = call.route if call.route in ALGORITHMS else "ring"  # NCCL's own choice, seen from outside
        return all_reduce_seconds(algorithm, ranks, max(call.nbytes), machine)
    if call.operation not in _FORMULAS:
        return None
    seconds, counted = _FORMULAS[call.operation]
    return seconds(ranks, counted(call.nbytes), machine)
