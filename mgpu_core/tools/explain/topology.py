"""Connections of the ranks: links with a latency and a bandwidth, GPUs in nodes, or one host's memory.

A bandwidth is not one number.  A working set that a cache holds moves faster than one that it does not, so a link
(and a host's memory) has a beta per tier, and a working set W finds min(1, held / W) of its bytes in a tier that
holds so many.  Times are in seconds, sizes in bytes, betas in seconds a byte: 1 / beta is a bandwidth.

The presets' bandwidths are those that NCCL's rings reach, not a data sheet's, and each names its source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["FORM", "HostMemory", "Link", "Machine", "Tier", "Topology", "blended_beta", "known_names", "parse_topology"]

GPUS_PER_NODE = 8
FORM = "LINK or LINK+NETWORK, such as nvlink4+ib-ndr400, or nvlink3+4xib-hdr200 for 4 network cards a node"


@dataclass(frozen=True, slots=True)
class Tier:
    """A level of memory, and its time per byte.

    Attributes:
        holds_nbytes: how many bytes the tier holds, those of the tiers before it included; ``None``: all.
        beta_s_per_byte: seconds to move one byte from or to there.
    """

    holds_nbytes: int | None
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible values."""
        if self.holds_nbytes is not None and self.holds_nbytes < 1:
            raise ValueError(f"a tier holds at least one byte, not {self.holds_nbytes}")
        _require_seconds("beta_s_per_byte", self.beta_s_per_byte)
        if self.beta_s_per_byte == 0:
            raise ValueError("beta_s_per_byte must be above 0: no memory is infinitely fast")


def blended_beta(tiers: Sequence[Tier], working_set_nbytes: float) -> float:
    """Return seconds per byte for a working set: each tier serves the bytes that the ones before do not hold.

    There is no step at the border of a tier: a working set twice as large as a cache still finds half of it there.
    """
    served = beta = 0.0
    for tier in tiers:
        held = 1.0 if tier.holds_nbytes is None else min(1.0, tier.holds_nbytes / max(1.0, working_set_nbytes))
        beta += max(0.0, held - served) * tier.beta_s_per_byte
        served = max(served, held)
    return beta


def _check_tiers(tiers: Sequence[Tier]) -> None:
    """Raise ``ValueError`` unless the tiers grow and the last one holds everything."""
    held = [math.inf if tier.holds_nbytes is None else tier.holds_nbytes for tier in tiers]
    if not held or held[-1] != math.inf or any(one >= two for one, two in pairwise(held)):
        raise ValueError("tiers go from the smallest to one that holds everything (holds_nbytes None)")


@dataclass(frozen=True, slots=True)
class Link:
    """A link that one GPU, or one network card, sends over, in one direction.

    Attributes:
        alpha_s: seconds of a message before its first byte.
        tiers: time per byte; most links have one tier.
    """

    alpha_s: float
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a negative latency or tiers that do not grow."""
        _require_seconds("alpha_s", self.alpha_s)
        _check_tiers(self.tiers)

    @classmethod
    def of(cls, alpha_s: float, bytes_per_second: float) -> Link:
        """Return a link with one bandwidth."""
        return cls(alpha_s, (Tier(None, 1 / bytes_per_second),))

    def beta_s_per_byte(self, working_set_nbytes: float) -> float:
        """Return seconds per byte, with ``nbytes`` bytes in use."""
        return blended_beta(self.tiers, working_set_nbytes)


@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs in equal nodes.

    Attributes:
        name: as on the command line.
        within: between two GPUs of a node.
        gpus_per_node: how many a node has.
        between: one network card; ``None``: there is one node.
        nics_per_node: network cards, which the GPUs of a node share.
        call_s: seconds to launch a collective, before its first message.
    """

    name: str
    within: Link
    gpus_per_node: int = GPUS_PER_NODE
    between: Link | None = None
    nics_per_node: int = GPUS_PER_NODE
    call_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for counts below 1 and negative times."""
        _require_seconds("call_s", self.call_s)
        for name in ("gpus_per_node", "nics_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def shape(self, ranks: int) -> tuple[int, int]:
        """Nodes, and GPUs in each, for so many ranks: the first node is filled first.

        Raises:
            ValueError: no GPU; several nodes that are not full; several nodes and no network between them.
        """
        if ranks < 1:
            raise ValueError(f"wanted at least 1 GPU, got {ranks}")
        if ranks <= self.gpus_per_node:
            return 1, ranks
        nodes, rest = divmod(ranks, self.gpus_per_node)
        if rest:
            raise ValueError(f"{ranks} GPUs are not a multiple of the {self.gpus_per_node} GPUs of a node")
        if self.between is None:
            raise ValueError(
                f"{ranks} GPUs are {nodes} nodes of {self.gpus_per_node}, and {self.name} names no network between "
                f"them: write {self.name}+NETWORK, NETWORK one of {', '.join(_NETWORKS)}"
            )
        return nodes, self.gpus_per_node


@dataclass(frozen=True, slots=True)
class HostMemory:
    """CPU ranks of one process: no links, one memory that all of them read and write.

    The core works with one core up to so many bytes of a result, because waking another costs more than it saves, and
    with all beyond; caches of one core and of all are not the same, so each has its own tiers.

    Attributes:
        call_s: seconds of a collective, whatever the ranks and the size.
        rank_s: seconds more for each rank: its tensor is checked and handed over.
        one_core: time per byte for one core.
        all_cores: time per byte for all of them together.
        name: as on the command line.
    """

    call_s: float
    rank_s: float
    one_core: tuple[Tier, ...]
    all_cores: tuple[Tier, ...]
    name: str = "host"

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for negative times or tiers that do not grow."""
        for field in ("call_s", "rank_s"):
            _require_seconds(field, getattr(self, field))
        _check_tiers(self.one_core)
        _check_tiers(self.all_cores)


Machine = Topology | HostMemory


def _require_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, not {value}")


# Latency of a message: NCCL 2.30, src/graph/tuning.cc, hwLatencies, protocol LL128 in a ring: 1.9 us over NVLink,
# 2.5 us over PCIe; 8.5 us over a network (the tree's row, which NCCL also takes where the network is not hidden).
# A DGX A100 measures 1.98 us a step of the ring (NVIDIA/nccl-tests, issue 123).
_NVLINK_S, _PCIE_S, _NETWORK_S = 1.9e-6, 2.5e-6, 8.5e-6
# Of a collective: the same file, baseLatencies, ring, LL; the DGX A100 above: 6.1 us.
_CALL_S = 6.6e-6

_LINKS = {
    # PCIe 4.0 x16: NCCL's log says PCI[24.0] (NVIDIA/nccl-tests, issue 307); four GPUs with peer access reach 25.9.
    "pcie4": Link.of(_PCIE_S, 24e9),
    # PCIe 5.0 x16: twice PCIe 4.0; GPUs below different host bridges reach half of it (NVIDIA/nccl, issue 1639).
    "pcie5": Link.of(_PCIE_S, 48e9),
    # A100: 12 links of 25 GB/s, 20 of them payload, 230 GB/s in all (NVIDIA/nccl-tests, issue 149, an NCCL author).
    "nvlink3": Link.of(_NVLINK_S, 230e9),
    # H100, NVSwitch: 18 links, 370 GB/s by a ring (NVIDIA/nccl-tests, issue 212, an NCCL author; NCCL: 18 x 20.6).
    "nvlink4": Link.of(_NVLINK_S, 370e9),
    # B200, NVSwitch: NCCL 2.30, src/graph/topo.h, SM100_NVLINK_BW: 18 x 40.1 GB/s.
    "nvlink5": Link.of(_NVLINK_S, 722e9),
}
_ALIASES = {"nvswitch3": "nvlink3", "nvswitch4": "nvlink4", "nvswitch5": "nvlink5"}
# Bandwidth of one card, and how many a node has unless the name says.
_NETWORKS = {
    # 24 GB/s a card of 200 Gb/s, 12 a card of 100 (NVIDIA/nccl-tests, issue 119, an NCCL author).
    "ib-hdr200": (Link.of(_NETWORK_S, 24e9), 8),
    # 46 to 48 GB/s a card of 400 Gb/s (NVIDIA/nccl-tests, issue 290, an NCCL author).
    "ib-ndr400": (Link.of(_NETWORK_S, 47e9), 8),
    # One card a node, with RDMA; through the kernel's TCP the latency is several times as long.
    "eth-100g": (Link.of(_NETWORK_S, 12e9), 1),
}


def known_names() -> str:
    """Return the names that a topology may have, for messages and help."""
    return f"links {', '.join((*_LINKS, *_ALIASES))}; networks {', '.join(_NETWORKS)}"


def parse_topology(text: str, gpus_per_node: int = GPUS_PER_NODE) -> Topology:
    """``"nvlink4+ib-ndr400"`` to H100 nodes of 8 GPUs and 8 cards; ``"nvlink3+4xib-hdr200"`` has 4 cards a node.

    Raises:
        ValueError: a name that is not known (the message lists those that are), or no GPU in a node.
    """
    match = re.fullmatch(r"([^+]+)(?:\+(?:([1-9][0-9]{0,3})x)?([^+]+))?", text.strip())
    link = _LINKS.get(_ALIASES.get(match[1], match[1])) if match else None
    if match is None or link is None or (match[3] is not None and match[3] not in _NETWORKS):
        raise ValueError(f"unknown topology {text!r}: wanted {FORM}; known are {known_names()}, and host alone")
    if match[3] is None:
        return Topology(text.strip(), link, gpus_per_node, call_s=_CALL_S)
    network, nics = _NETWORKS[match[3]]
    return Topology(text.strip(), link, gpus_per_node, network, int(match[2] or nics), _CALL_S)
