"""Costs of collectives over links, without the call itself: messages that pay alpha, and bytes that pay beta.

A message of n bytes takes alpha + n x beta seconds, and messages that run at the same time over different links cost
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu_core.tools.explain.topology import Topology

__all__ = ["ALL_REDUCES", "Cost", "Shape", "around", "broadcast", "choices", "reduce", "scatter", "shape_of"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds in two parts: latency per message, and time per byte."""

    latency_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.latency_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Shape:
    """A topology filled with ranks: `nodes` of `local` GPUs; alpha in seconds, beta in seconds a byte.

    `node_beta` is that of all network cards of a node together, `nic_beta` that of one, which a single message takes.
    """

    ranks: int
    nodes: int
    local: int
    alpha: float
    beta: float
    node_alpha: float
    nic_beta: float
    node_beta: float


def shape_of(topology: Topology, ranks: int, nbytes: float) -> Shape:
    """So many ranks on this topology, with messages of so many bytes.

    Raises:
        ValueError: see :meth:`Topology.shape`.
    """
    nodes, local = topology.shape(ranks)
    between = topology.between or topology.within
    nic_beta = between.beta_s_per_byte(nbytes)
    within = topology.within
    cards = topology.nics_per_node
    return Shape(
        ranks, nodes, local, within.alpha_s, within.beta_s_per_byte(nbytes), between.alpha_s, nic_beta, nic_beta / cards
    )


def _naive(at: Shape, nbytes: float) -> Cost:
    """Model all into rank 0, then rank 0 to all: 2 (n - 1) messages of S bytes over rank 0's link, in turn."""
    local, far = 2 * (at.local - 1), 2 * (at.ranks - at.local)
    return Cost(local * at.alpha + far * at.node_alpha, nbytes * (local * at.beta + far * at.nic_beta))


def _direct(at: Shape, nbytes: float) -> Cost:
    """2 alpha + 2 (n - 1) / n S beta: every rank reads its slice from all and writes the sum to all, all at once.

    As in this package's core, over peers of one node: two phases, however many peers there are.
    """
    if at.nodes > 1:
        raise ValueError(f"direct reads and writes the memory of peers, which {at.nodes} nodes do not share: name ring")
    return Cost(2 * at.alpha, around(at.ranks) * nbytes * at.beta)


def _ring(at: Shape, nbytes: float) -> Cost:
    """2 (n - 1) alpha + 2 (n - 1) / n S beta (Patarasuk and Yuan, 2009; Thakur et al. 2005).

    Over N nodes a chunk crosses a border at most 2 N times on its way, and the beta is that of the slower of a GPU's
    link and all network cards of a node, because NCCL lays one ring over each card.
    """
    steps = 2 * (at.ranks - 1)
    crossing = min(steps, 2 * at.nodes) if at.nodes > 1 else 0
    beta = max(at.beta, at.node_beta) if at.nodes > 1 else at.beta
    latency = (steps - crossing) * at.alpha + crossing * at.node_alpha
    return Cost(latency, around(at.ranks) * nbytes * beta)


def _tree(at: Shape, nbytes: float) -> Cost:
    """2 ceil(log2 n) (alpha + S beta): a binomial reduce and a binomial broadcast, not pipelined, as in this core.

    (Thakur et al. 2005.)  Over nodes: ceil(log2 local) rounds inside, ceil(log2 N) between, of
    one message each, which takes one network card.
    """
    inside, outside = 2 * _rounds(at.local), 2 * _rounds(at.nodes)
    latency = inside * at.alpha + outside * at.node_alpha
    return Cost(latency, nbytes * (inside * at.beta + outside * at.nic_beta))


def _hierarchical(at: Shape, nbytes: float) -> Cost:
    """Reduce-scatter inside each node, all-reduce between nodes, all-gather inside, one after another.

    With g GPUs a node: 2 (g - 1) alpha + 2 (g - 1) / g S beta inside, by rings; between N nodes, each GPU of a node
    with its S / g and its share of the cards: 2 (N - 1) alpha + 2 (N - 1) / N S beta_node, by rings.
    """
    return _inside_and_between(at, nbytes, 2 * (at.nodes - 1))


def _halving(at: Shape, nbytes: float) -> Cost:
    """Return the cost of a hierarchy with recursive halving and doubling between nodes.

    It pays 2 ceil(log2 N) alpha instead of 2 (N - 1).

    (Rabenseifner, 2004; Thakur et al. 2005: 2 lg p alpha + 2 (p - 1) / p n beta.  Exact for powers of two;
    other numbers of nodes pay a little more than this.)  NCCL's trees between nodes have such a latency too.
    """
    return _inside_and_between(at, nbytes, 2 * _rounds(at.nodes))


def _inside_and_between(at: Shape, nbytes: float, messages: int) -> Cost:
    latency = 2 * (at.local - 1) * at.alpha + messages * at.node_alpha
    return Cost(latency, nbytes * (around(at.local) * at.beta + around(at.nodes) * at.node_beta))


ALL_REDUCES: Mapping[str, Callable[[Shape, float], Cost]] = {
    "naive": _naive,
    "direct": _direct,
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "halving": _halving,
}


def choices(at: Shape) -> tuple[str, ...]:
    """Return the all-reduces of which ``auto`` takes the fastest."""
    return ("direct", "ring") if at.nodes == 1 else ("ring", "halving", "hierarchical")


def broadcast(at: Shape, nbytes: float) -> Cost:
    """ceil(log2 n) (alpha + S beta): the way down of the tree."""
    both = _tree(at, nbytes)
    return Cost(both.latency_s / 2, both.transfer_s / 2)


def scatter(at: Shape, nbytes: float) -> Cost:
    """(n - 1) alpha + (n - 1) / n S beta within a node, of whose share S is: one message a rank, over the root's link.

    Several nodes have a process each, whose batch is its own part: every node scatters S / N at the same time.
    """
    share = nbytes / at.nodes
    return Cost((at.local - 1) * at.alpha, (at.local - 1) / at.local * share * at.beta)


def reduce(at: Shape, nbytes: float) -> Cost:
    """Return alpha + (n - 1) S beta: one kernel of the root reads all ranks' memory, over the root's one link.

    Raises:
        ValueError: several nodes, which share no memory.
    """
    if at.nodes > 1:
        raise ValueError(f"reduce reads the memory of peers, which {at.nodes} nodes do not share")
    return Cost(at.alpha, (at.ranks - 1) * nbytes * at.beta)


def around(ranks: int) -> float:
    """2 (n - 1) / n: the share of its bytes that a rank sends in an all-reduce (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))
