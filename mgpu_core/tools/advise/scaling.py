"""Predict two machines like this one by the cost model, with an assumption on their connection."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_core.tools.advise.recommend import Scaling
from mgpu_core.tools.explain.predict import Plan, predict_step
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.topology import parse_topology

__all__ = ["assumed_topology", "scaling_of"]

_NVLINK = {
    "A100": "nvlink3",
    "A800": "nvlink3",
    "H100": "nvlink4",
    "H200": "nvlink4",
    "H800": "nvlink4",
    "B200": "nvlink5",
}


def assumed_topology(gpu: str) -> str:
    """From a GPU's name: data-centre modules have NVLink and InfiniBand, cards have PCIe and Ethernet."""
    link = next((link for name, link in _NVLINK.items() if name in gpu), None)
    return "pcie4+eth-100g" if link is None or "PCIe" in gpu or "PCIE" in gpu else f"{link}+ib-hdr200"


def scaling_of(profile: StepProfile, gpus: Sequence[str]) -> Scaling:
    """Twice as many GPUs, on two machines; each GPU keeps its rows.

    Args:
        profile: of a step on these GPUs.
        gpus: the name of each.
    """
    topology = assumed_topology(gpus[0])
    plan = Plan(parse_topology(topology, gpus_per_node=len(gpus)))
    found = predict_step(profile, 2 * len(gpus), plan)
    return Scaling(topology, found.gpus, found.efficiency)
