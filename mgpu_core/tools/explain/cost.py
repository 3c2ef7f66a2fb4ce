"""How long an all-reduce, a scatter or a gather, and a broadcast take over links: pure functions of a few numbers.

A message of n bytes takes alpha + n x beta seconds, beta being 1 / bandwidth; messages that travel at the same time
over different links cost once (the model of Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005).  Every collective pays ``Topology.call_s`` once; one rank alone pays nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mgpu_core.tools.explain.topology import Topology

__all__ = ["Cost", "all_reduce", "broadcast", "scatter"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds in two parts: latency of the call and its messages, and time of the bytes."""

    latency_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.latency_s + self.transfer_s


def all_reduce(topology: Topology, ranks: int, nbytes: float) -> Cost:
    """Return the cost of an all-reduce of ``nbytes`` bytes a rank: the messages of trees, the bytes of rings.

    With n ranks in N nodes of g: 2 (g - 1) alpha inside a node, 2 ceil(log2 N) alpha' between nodes, and the bytes of a
    ring over all, 2 (n - 1) / n S beta (Patarasuk and Yuan, 2009), at the pace of the slower of a GPU's link and all
    network cards of a node.  NCCL takes trees between nodes for small messages and rings for large ones.

    Raises:
        ValueError: see :meth:`Topology.shape`.
    """
    nodes, local = topology.shape(ranks)
    if ranks == 1:
        return Cost()
    within, network = topology.within, (nodes > 1 and topology.network) or topology.within
    latency = topology.call_s + 2 * (local - 1) * within.alpha_s + 2 * _rounds(nodes) * network.alpha_s
    slower = within if local > 1 and within.bytes_per_second < network.bytes_per_second else network
    return Cost(latency, 2 * (ranks - 1) / ranks * nbytes / slower.bytes_per_second)


def scatter(topology: Topology, ranks: int, nbytes: float) -> float:
    """Return the seconds to send each rank its share of ``nbytes`` bytes (the whole), or to gather it from there.

    (n - 1) alpha + (n - 1) / n S beta: one message a rank, over the root's link.  Several nodes have a process each,
    whose batch is its own part: all scatter at the same time.

    Raises:
        ValueError: see :meth:`Topology.shape`.
    """
    nodes, local = topology.shape(ranks)
    if local == 1:
        return 0.0
    link = topology.within
    share = nbytes / nodes * (local - 1) / local
    return topology.call_s + (local - 1) * link.alpha_s + share / link.bytes_per_second


def broadcast(topology: Topology, ranks: int, nbytes: float) -> float:
    """Return the seconds until all ranks of each node have the ``nbytes`` bytes of its first: ceil(log2 n) messages.

    Raises:
        ValueError: see :meth:`Topology.shape`.
    """
    _, local = topology.shape(ranks)
    if local == 1:
        return 0.0
    link = topology.within
    return topology.call_s + _rounds(local) * (link.alpha_s + nbytes / link.bytes_per_second)


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))
