"""Why a step over many ranks is no faster than it is: one reason, from numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_core.tools.advise.shares import StepShares

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "IMBALANCE",
    "INPUT",
    "LAUNCH",
    "NOTABLE",
    "Reason",
    "UNKNOWN",
    "UPDATE",
    "is_launch_bound",
    "reason_of",
]

INPUT, COMMUNICATION, LAUNCH, IMBALANCE = "input pipeline", "communication", "launch overhead", "imbalance"
UPDATE, COMPUTE, UNKNOWN = "update", "compute", "unknown"

NOTABLE = 0.1
"""A share of the step from which on it is a reason."""

_LAUNCH_BOUND = 0.9


@dataclass(frozen=True, slots=True)
class Reason:
    """The main cost of many ranks.

    Attributes:
        name: one of the constants of this file.
        text: a sentence with its number.
    """

    name: str
    text: str


def is_launch_bound(shares: StepShares) -> bool:
    """Return whether GPUs run no longer than the host takes to launch their work: then they wait for it."""
    return shares.launch_ratio is not None and shares.launch_ratio >= _LAUNCH_BOUND


def reason_of(
    shares: StepShares | None, *, ranks: int, device_count: int, best_s: float | None, loader_s: float | None = None
) -> Reason:
    """Return the main cost: a slow input pipeline, otherwise the largest notable share, otherwise compute.

    Args:
        shares: of a recorded step of all ranks.
        ranks: how many there are.
        device_count: number of distinct devices.
        best_s: seconds of the best way's step.
        loader_s: seconds in which the loader has as many rows.
    """
    if loader_s is not None and best_s is not None and loader_s > best_s:
        return Reason(INPUT, f"loading a batch takes {loader_s / best_s:.2g} times as long as the best step")
    if shares is None:
        return Reason(UNKNOWN, "no step over all ranks could be recorded")
    costs = {
        COMMUNICATION: shares.exposed_share,
        LAUNCH: shares.overhead_share + (shares.compute_share if is_launch_bound(shares) else 0.0),
        IMBALANCE: shares.waiting_share,
        UPDATE: shares.update_share,
    }
    name = max(costs, key=costs.__getitem__)
    shared = (
        f"; {ranks} ranks share {device_count} {'device' if device_count == 1 else 'devices'}"
        if device_count < ranks
        else ""
    )
    if costs[name] < NOTABLE:
        return Reason(COMPUTE, f"some rank computes in {shares.compute_share:.0%} of the step{shared}")
    return Reason(name, _text(name, shares) + shared)


def _text(name: str, shares: StepShares) -> str:
    if name == COMMUNICATION:
        return f"in {shares.exposed_share:.0%} of the step gradients are summed, and no rank computes"
    if name == IMBALANCE:
        return f"the slowest rank computes {shares.imbalance:.0%} longer than the mean, and the others wait"
    if name == UPDATE:
        return f"in {shares.update_share:.0%} of the step the optimizer updates, which more ranks do not shorten"
    if is_launch_bound(shares):
        return f"launching takes the host {shares.launch_ratio:.0%} of the time that the GPUs run: they wait for it"
    return f"in {shares.overhead_share:.0%} of the step no rank computes: the host splits, wakes ranks, launches"
