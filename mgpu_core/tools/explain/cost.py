"""How long all-reduce, broadcast, reduce, scatter and gather take: pure functions of a few numbers.

Over links (``topology.Topology``) a message of n bytes takes alpha + n x beta seconds, and messages that travel at the
same time over different links cost once (the model of Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005); see ``link_costs``.  CPU ranks of one process share a memory instead of links
(``topology.HostMemory``): there the bytes that the core's loops read and write are counted, pass by pass, and each pass
pays the beta of the tier in which its working set lies.  On both, every collective pays ``call_s`` once, and one rank
alone pays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mgpu_core.tools.explain import link_costs
from mgpu_core.tools.explain.host_passes import Pass, host_passes
from mgpu_core.tools.explain.link_costs import Cost, shape_of
from mgpu_core.tools.explain.step_profile import Bucket, StepProfile
from mgpu_core.tools.explain.topology import HostMemory, Machine, blended_beta

__all__ = [
    "ALGORITHMS",
    "Bucket",
    "Cost",
    "StepProfile",
    "all_reduce_cost",
    "all_reduce_seconds",
    "broadcast_seconds",
    "bus_bandwidth",
    "gather_seconds",
    "reduce_seconds",
    "scatter_seconds",
]

ALGORITHMS = ("auto", *link_costs.ALL_REDUCES)


def all_reduce_cost(algorithm: str, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """Return the cost of an all-reduce of ``nbytes`` bytes a rank; one rank alone pays nothing.

    Args:
        algorithm: of :data:`ALGORITHMS`.  ``auto`` is, as in :func:`mgpu_core.comm.all_reduce`, ``direct`` on the host,
            and over links the fastest: of ring and direct within a node, of ring, halving and hierarchical over nodes.
        ranks: in the team, at least 1.
        nbytes: of one rank's tensor, not negative.
        machine: links, or this host's memory.

    Raises:
        ValueError: an unknown algorithm, or one that this machine has not; numbers out of range; nodes that are not
            full, or without a network (:meth:`Topology.shape`).
    """
    _check(ranks, nbytes)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: wanted one of {', '.join(ALGORITHMS)}")
    if isinstance(machine, HostMemory):
        return _on_host(machine, ranks, nbytes, host_passes(algorithm, ranks, nbytes))
    at = shape_of(machine, ranks, nbytes)
    names = link_costs.choices(at) if algorithm == "auto" else (algorithm,)
    found = [link_costs.ALL_REDUCES[name](at, nbytes) for name in names]
    return _called(machine, ranks, min(found, key=lambda each: each.seconds))


def all_reduce_seconds(algorithm: str, ranks: int, nbytes: float, machine: Machine) -> float:
    """Return the seconds of :func:`all_reduce_cost`, which has the arguments and the errors."""
    return all_reduce_cost(algorithm, ranks, nbytes, machine).seconds


def bus_bandwidth(ranks: int, nbytes: float, seconds: float) -> float:
    """nccl-tests' busbw of an all-reduce, in bytes a second: 2 (n - 1) / n x nbytes / seconds (doc/PERFORMANCE.md)."""
    return link_costs.around(ranks) * nbytes / seconds


def scatter_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Return the seconds to send each rank its share of rank 0's ``nbytes`` bytes (the whole).

    Several nodes have a process each, and scatter their own parts at the same time.

    Raises:
        ValueError: as for :func:`all_reduce_cost`.
    """
    _check(ranks, nbytes)
    if isinstance(machine, HostMemory):
        return _on_host(machine, ranks, nbytes / ranks, [Pass(nbytes, 3 * nbytes, False)]).seconds
    at = shape_of(machine, ranks, nbytes)
    return _called(machine, at.local, link_costs.scatter(at, nbytes)).seconds


def gather_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Return the seconds to join parts of ``nbytes`` bytes (the whole) at rank 0: :func:`scatter_seconds`, reversed."""
    return scatter_seconds(ranks, nbytes, machine)


def broadcast_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Return the seconds until all ranks have the ``nbytes`` bytes of rank 0, by a binomial tree (Thakur et al. 2005).

    Raises:
        ValueError: as for :func:`all_reduce_cost`.
    """
    _check(ranks, nbytes)
    if isinstance(machine, HostMemory):
        copies = (ranks - 1) * nbytes
        return _on_host(machine, ranks, nbytes, [Pass(copies, 3 * copies, False)]).seconds
    return _called(machine, ranks, link_costs.broadcast(shape_of(machine, ranks, nbytes), nbytes)).seconds


def reduce_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Return the seconds until rank 0 has the sum of ``nbytes`` bytes of each rank, as this core does it.

    Raises:
        ValueError: as for :func:`all_reduce_cost`; several nodes, which share no memory.
    """
    _check(ranks, nbytes)
    if isinstance(machine, HostMemory):  # n inputs are read; the result's lines are read before they are written
        return _on_host(machine, ranks, nbytes, [Pass(nbytes, (ranks + 2) * nbytes, True)]).seconds
    return _called(machine, ranks, link_costs.reduce(shape_of(machine, ranks, nbytes), nbytes)).seconds


def _on_host(host: HostMemory, ranks: int, rank_nbytes: float, passes: Sequence[Pass]) -> Cost:
    """Return the cost with ``rank_nbytes`` bytes per rank; all ranks' bytes are the working set."""
    seconds = 0.0
    for each in passes:
        tiers = host.one_core if each.is_serial() else host.all_cores
        seconds += each.traffic_nbytes * blended_beta(tiers, ranks * rank_nbytes)
    return _called(host, ranks, Cost(ranks * host.rank_s, seconds))


def _called(machine: Machine, ranks: int, moving: Cost) -> Cost:
    """Return the cost of moving the bytes and, once, of the call; a single rank pays nothing."""
    return Cost(machine.call_s + moving.latency_s, moving.transfer_s) if ranks > 1 else Cost()


def _check(ranks: int, nbytes: float) -> None:
    if ranks < 1:
        raise ValueError(f"wanted at least 1 rank, got {ranks}")
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise ValueError(f"nbytes must be finite and not negative, not {nbytes}")
