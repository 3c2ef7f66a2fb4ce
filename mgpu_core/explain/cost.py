"""How long scatter, broadcast, gather and all-reduce take: alpha-beta formulas, pure functions of a few numbers.

Over links (:class:`~mgpu_core.explain.topology.Topology`) a message of n bytes takes alpha + n x beta seconds, and what
runs at the same time over different links costs once (the model of Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005).  CPU ranks of one process share a memory instead of links
(:class:`~mgpu_core.explain.topology.HostMemory`): there the bytes that the core's loops read and write are counted,
pass by pass, and each pass pays the beta of the tier in which its working set lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgpu_core.explain.host_passes import Pass, host_passes
from mgpu_core.explain.step_profile import Bucket, StepProfile
from mgpu_core.explain.topology import HostMemory, Machine, Topology, blended_beta

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
    "scatter_seconds",
]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds in two parts: what is paid for each message, and what is paid for each byte."""

    latency_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.latency_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class _Shape:
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


def _shape(topology: Topology, ranks: int, nbytes: float) -> _Shape:
    nodes, local = topology.shape(ranks)
    between = topology.between or topology.within
    nic_beta = between.beta_s_per_byte(nbytes)
    within = topology.within
    cards = topology.nics_per_node
    return _Shape(
        ranks, nodes, local, within.alpha_s, within.beta_s_per_byte(nbytes), between.alpha_s, nic_beta, nic_beta / cards
    )


def _naive(at: _Shape, nbytes: float) -> Cost:
    """All into rank 0, then rank 0 to all: 2 (n - 1) messages of S bytes over rank 0's one link, one after another."""
    local, far = 2 * (at.local - 1), 2 * (at.ranks - at.local)
    return Cost(local * at.alpha + far * at.node_alpha, nbytes * (local * at.beta + far * at.nic_beta))


def _direct(at: _Shape, nbytes: float) -> Cost:
    """2 alpha + 2 (n - 1) / n S beta: every rank reads its slice from all and writes the sum to all, all at once.

    As in this package's core, over peers of one node: two phases, however many peers there are.
    """
    if at.nodes > 1:
        raise ValueError(f"direct reads and writes the memory of peers, which {at.nodes} nodes do not share: name ring")
    return Cost(2 * at.alpha, _around(at.ranks) * nbytes * at.beta)


def _ring(at: _Shape, nbytes: float) -> Cost:
    """2 (n - 1) alpha + 2 (n - 1) / n S beta (Patarasuk and Yuan, 2009; Thakur et al. 2005).

    Over N nodes a chunk crosses a border at most 2 N times on its way, and the beta is that of the slower of a GPU's
    link and all network cards of a node, because NCCL lays one ring over each card.
    """
    steps = 2 * (at.ranks - 1)
    crossing = min(steps, 2 * at.nodes) if at.nodes > 1 else 0
    beta = max(at.beta, at.node_beta) if at.nodes > 1 else at.beta
    latency = (steps - crossing) * at.alpha + crossing * at.node_alpha
    return Cost(latency, _around(at.ranks) * nbytes * beta)


def _tree(at: _Shape, nbytes: float) -> Cost:
    """2 ceil(log2 n) (alpha + S beta): a binomial reduce and a binomial broadcast, not pipelined, as in this core.

    (Thakur et al. 2005.)  Over nodes: ceil(log2 local) rounds inside, ceil(log2 N) between, of
    one message each, which takes one network card.
    """
    inside, outside = 2 * _rounds(at.local), 2 * _rounds(at.nodes)
    latency = inside * at.alpha + outside * at.node_alpha
    return Cost(latency, nbytes * (inside * at.beta + outside * at.nic_beta))


def _hierarchical(at: _Shape, nbytes: float) -> Cost:
    """Reduce-scatter inside each node, all-reduce between nodes, all-gather inside, one after another.

    With g GPUs a node: 2 (g - 1) alpha + 2 (g - 1) / g S beta inside, by rings; between N nodes, each GPU of a node
    with its S / g and its share of the cards: 2 (N - 1) alpha + 2 (N - 1) / N S beta_node, by rings.
    """
    return _inside_and_between(at, nbytes, 2 * (at.nodes - 1))


def _halving(at: _Shape, nbytes: float) -> Cost:
    """As hierarchical, with recursive halving and doubling between nodes: 2 ceil(log2 N) alpha instead of 2 (N - 1).

    (Rabenseifner, 2004; Thakur et al. 2005: 2 lg p alpha + 2 (p - 1) / p n beta.  Exact for powers of two;
    other numbers of nodes pay a little more than this.)  NCCL's trees between nodes have such a latency too.
    """
    return _inside_and_between(at, nbytes, 2 * _rounds(at.nodes))


def _inside_and_between(at: _Shape, nbytes: float, messages: int) -> Cost:
    latency = 2 * (at.local - 1) * at.alpha + messages * at.node_alpha
    return Cost(latency, nbytes * (_around(at.local) * at.beta + _around(at.nodes) * at.node_beta))


_OVER_LINKS: Mapping[str, Callable[[_Shape, float], Cost]] = {
    "naive": _naive,
    "direct": _direct,
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "halving": _halving,
}
ALGORITHMS = ("auto", *_OVER_LINKS)


def _around(ranks: int) -> float:
    """2 (n - 1) / n: the share of its bytes that a rank sends in an all-reduce (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks


def _rounds(places: int) -> int:
    return math.ceil(math.log2(places))


def all_reduce_cost(algorithm: str, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """What an all-reduce of ``nbytes`` bytes a rank costs; one rank alone pays nothing.

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
        return _on_host(machine, ranks, nbytes, host_passes(algorithm, ranks, nbytes) if ranks > 1 else [])
    at = _shape(machine, ranks, nbytes)
    if ranks == 1:
        return Cost()
    costs = [_OVER_LINKS[name](at, nbytes) for name in (_choices(at) if algorithm == "auto" else (algorithm,))]
    cost = min(costs, key=lambda each: each.seconds)
    return Cost(machine.call_s + cost.latency_s, cost.transfer_s)


def _choices(at: _Shape) -> tuple[str, ...]:
    return ("direct", "ring") if at.nodes == 1 else ("ring", "halving", "hierarchical")


def all_reduce_seconds(algorithm: str, ranks: int, nbytes: float, machine: Machine) -> float:
    """The seconds of :func:`all_reduce_cost`, which has the arguments and the errors."""
    return all_reduce_cost(algorithm, ranks, nbytes, machine).seconds


def bus_bandwidth(ranks: int, nbytes: float, seconds: float) -> float:
    """nccl-tests' busbw of an all-reduce, in bytes a second: 2 (n - 1) / n x nbytes / seconds (doc/PERFORMANCE.md)."""
    return _around(ranks) * nbytes / seconds


def scatter_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Seconds to give each rank its share of ``nbytes`` bytes (the whole) that lie at rank 0.

    (n - 1) alpha + (n - 1) / n S beta within a node: one message a rank, all over the root's link.  Several nodes have
    a process each, whose batch is its own part: every node scatters S / N at the same time.

    Raises:
        ValueError: as for :func:`all_reduce_cost`.
    """
    _check(ranks, nbytes)
    if isinstance(machine, HostMemory):
        return _on_host(machine, ranks, nbytes / ranks, [Pass(nbytes, 3 * nbytes, False)]).seconds
    at = _shape(machine, ranks, nbytes)
    share = nbytes / at.nodes
    return (at.local - 1) * at.alpha + (at.local - 1) / at.local * share * at.beta


def gather_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Seconds to bring parts of ``nbytes`` bytes together (the whole) to rank 0: :func:`scatter_seconds`, backwards."""
    return scatter_seconds(ranks, nbytes, machine)


def broadcast_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Seconds until all ranks have the ``nbytes`` bytes of rank 0: ceil(log2 n) (alpha + S beta), a binomial tree.

    (Thakur et al. 2005.)  Over nodes, ceil(log2 N) rounds go between them, each over one network card.

    Raises:
        ValueError: as for :func:`all_reduce_cost`.
    """
    _check(ranks, nbytes)
    if isinstance(machine, HostMemory):
        copies = (ranks - 1) * nbytes
        return _on_host(machine, ranks, nbytes, [Pass(copies, 3 * copies, False)]).seconds
    at = _shape(machine, ranks, nbytes)
    return _tree(at, nbytes).seconds / 2


def reduce_seconds(ranks: int, nbytes: float, machine: Machine) -> float:
    """Seconds until rank 0 has the sum of ``nbytes`` bytes of each rank, as this core does it: alpha + (n - 1) S beta.

    One kernel of the root reads all ranks' memory, over the root's one link.

    Raises:
        ValueError: as for :func:`all_reduce_cost`; several nodes, which share no memory.
    """
    _check(ranks, nbytes)
    if isinstance(machine, HostMemory):  # n inputs are read; the result's lines are read before they are written
        return _on_host(machine, ranks, nbytes, [Pass(nbytes, (ranks + 2) * nbytes, True)]).seconds
    at = _shape(machine, ranks, nbytes)
    if at.nodes > 1:
        raise ValueError(f"reduce reads the memory of peers, which {at.nodes} nodes do not share")
    return (at.alpha if ranks > 1 else 0.0) + (ranks - 1) * nbytes * at.beta


def _on_host(host: HostMemory, ranks: int, rank_nbytes: float, passes: Sequence[Pass]) -> Cost:
    """``rank_nbytes``: what each rank holds; all ranks' bytes together are the working set."""
    seconds = 0.0
    for each in passes:
        tiers = host.one_core if each.is_serial() else host.all_cores
        seconds += each.traffic_nbytes * blended_beta(tiers, ranks * rank_nbytes)
    return Cost(host.call_s + ranks * host.rank_s, seconds) if passes else Cost()


def _check(ranks: int, nbytes: float) -> None:
    if ranks < 1:
        raise ValueError(f"wanted at least 1 rank, got {ranks}")
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise ValueError(f"nbytes must be finite and not negative, not {nbytes}")
