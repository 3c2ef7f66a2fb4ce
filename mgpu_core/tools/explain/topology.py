"""Links between GPUs: a latency and a bandwidth each, and GPUs in equal nodes.

Times are in seconds, bandwidths in bytes a second.  The presets' bandwidths are those that NCCL's rings reach, not a
data sheet's, and each names its source.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["FORM", "GPUS_PER_NODE", "Link", "Topology", "known_names", "parse_topology"]

GPUS_PER_NODE = 8
FORM = "LINK or LINK+NETWORK, such as nvlink4+ib-ndr400, or nvlink3+4xib-hdr200 for 4 network cards a node"


@dataclass(frozen=True, slots=True)
class Link:
    """A link that one GPU, or one network card, sends over, in one direction.

    Attributes:
        alpha_s: seconds of a message before its first byte.
        bytes_per_second: bandwidth.
    """

    alpha_s: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible values."""
        if not (0 <= self.alpha_s < math.inf and 0 < self.bytes_per_second < math.inf):
            raise ValueError(f"alpha_s must be 0 or more, bytes_per_second above 0, and both finite: {self}")


@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs in equal nodes.

    Attributes:
        name: as on the command line.
        within: between two GPUs of a node.
        gpus_per_node: how many a node has.
        network: from node to node, all network cards of a node together; ``None``: there is one node.
        call_s: seconds to launch a collective, before its first message.
    """

    name: str
    within: Link
    gpus_per_node: int = GPUS_PER_NODE
    network: Link | None = None
    call_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a node without GPUs."""
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be at least 1, not {self.gpus_per_node}")

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
        if self.network is None:
            raise ValueError(
                f"{ranks} GPUs are {nodes} nodes of {self.gpus_per_node}, and {self.name} names no network between "
                f"them: write {self.name}+NETWORK, NETWORK one of {', '.join(_NETWORKS)}"
            )
        return nodes, self.gpus_per_node


# Latency of a message: NCCL 2.30, src/graph/tuning.cc, hwLatencies, protocol LL128 in a ring: 1.9 us over NVLink,
# 2.5 us over PCIe; 8.5 us over a network (the tree's row, which NCCL also takes where the network is not hidden).
# A DGX A100 measures 1.98 us a step of the ring (NVIDIA/nccl-tests, issue 123).
_NVLINK_S, _PCIE_S, _NETWORK_S = 1.9e-6, 2.5e-6, 8.5e-6
# Of a collective: the same file, baseLatencies, ring, LL; the DGX A100 above: 6.1 us.
_CALL_S = 6.6e-6

_LINKS = {
    # PCIe 4.0 x16: NCCL's log says PCI[24.0] (NVIDIA/nccl-tests, issue 307); four GPUs with peer access reach 25.9.
    "pcie4": Link(_PCIE_S, 24e9),
    # PCIe 5.0 x16: twice PCIe 4.0; GPUs below different host bridges reach half of it (NVIDIA/nccl, issue 1639).
    "pcie5": Link(_PCIE_S, 48e9),
    # A100: 12 links of 25 GB/s, 20 of them payload, 230 GB/s in all (NVIDIA/nccl-tests, issue 149, an NCCL author).
    "nvlink3": Link(_NVLINK_S, 230e9),
    # H100, NVSwitch: 18 links, 370 GB/s by a ring (NVIDIA/nccl-tests, issue 212, an NCCL author; NCCL: 18 x 20.6).
    "nvlink4": Link(_NVLINK_S, 370e9),
    # B200, NVSwitch: NCCL 2.30, src/graph/topo.h, SM100_NVLINK_BW: 18 x 40.1 GB/s.
    "nvlink5": Link(_NVLINK_S, 722e9),
}
# Bandwidth of one card, and how many a node has unless the name says.
_NETWORKS = {
    # 24 GB/s a card of 200 Gb/s, 12 a card of 100 (NVIDIA/nccl-tests, issue 119, an NCCL author).
    "ib-hdr200": (Link(_NETWORK_S, 24e9), 8),
    # 46 to 48 GB/s a card of 400 Gb/s (NVIDIA/nccl-tests, issue 290, an NCCL author).
    "ib-ndr400": (Link(_NETWORK_S, 47e9), 8),
    # One card a node, with RDMA; through the kernel's TCP the latency is several times as long.
    "eth-100g": (Link(_NETWORK_S, 12e9), 1),
}


def known_names() -> str:
    """Return the names that a topology may have, for messages and help."""
    return f"links {', '.join(_LINKS)}; networks {', '.join(_NETWORKS)}"


def parse_topology(text: str, gpus_per_node: int = GPUS_PER_NODE) -> Topology:
    """``"nvlink4+ib-ndr400"`` to H100 nodes of 8 GPUs and 8 cards; ``"nvlink3+4xib-hdr200"`` has 4 cards a node.

    Raises:
        ValueError: a name that is not known (the message lists those that are), or no GPU in a node.
    """
    match = re.fullmatch(r"([^+]+)(?:\+(?:([1-9][0-9]{0,3})x)?([^+]+))?", text.strip())
    link = _LINKS.get(match[1]) if match else None
    if match is None or link is None or (match[3] is not None and match[3] not in _NETWORKS):
        raise ValueError(f"unknown topology {text!r}: wanted {FORM}; known are {known_names()}")
    if match[3] is None:
        return Topology(text.strip(), link, gpus_per_node, call_s=_CALL_S)
    card, count = _NETWORKS[match[3]]
    network = Link(card.alpha_s, card.bytes_per_second * int(match[2] or count))
    return Topology(text.strip(), link, gpus_per_node, network, _CALL_S)
