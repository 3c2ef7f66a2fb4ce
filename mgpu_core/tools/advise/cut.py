"""A model that does not fit on one device: where to cut it."""

from __future__ import annotations

from mgpu_core.devices.memory import total_nbytes
from mgpu_core.pipeline.balance import cut_layers, measured_layers
from mgpu_core.tools.advise.memory import Memory
from mgpu_core.tools.advise.plan import Plan
from mgpu_core.tools.advise.recommend import PIPELINE, Recommendation
from mgpu_core.tools.explain.tables import human_nbytes
from mgpu_core.trees.module_copy import copy_module

__all__ = ["capacity_of", "recommended_cut"]

_MOST_PARTS = 16


def capacity_of(plan: Plan) -> int | None:
    """Return the bytes of the smallest device: as given, or of the accelerators; ``None``: unknown."""
    if plan.device_nbytes is not None:
        return plan.device_nbytes
    found = [total_nbytes(each) for each in plan.distinct_devices]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def recommended_cut(plan: Plan, memory: Memory, capacity: int) -> Recommendation:
    """Return the fewest parts that fit, cut so that the largest needs the least memory.

    A part needs its share, by parameters, buffers and what autograd keeps, of the rank's memory.  Micro-batches need
    less, since not all of them are in a stage at once.
    """
    net = copy_module(plan.net).cpu()
    inputs = plan.sample if plan.loss_fn is None else plan.sample[:-1]
    layers = measured_layers(net, tuple(each.cpu() for each in inputs), _MOST_PARTS)
    total = sum(layer.nbytes for layer in layers)
    needs = f"the model needs {human_nbytes(memory.total_nbytes)}, and a device has {human_nbytes(capacity)}"
    for parts in range(2, min(len(layers), _MOST_PARTS) + 1):
        split, table = cut_layers(layers, parts, "memory")
        largest = int(memory.total_nbytes * table.parts[table.worst].nbytes / total)
        if largest <= capacity:
            text = (
                f"{PIPELINE}: {needs}. Cut it over {parts} devices, of which the fullest needs about "
                f"{human_nbytes(largest)}, or less with more micro-batches: "
                f"pipe = mgpu_core.Pipeline(net, device_ids, split_points={split}); "
                "step = mgpu_core.TrainStep(pipe, loss_fn, optimizer)"
            )
            return Recommendation(PIPELINE, False, text)
    largest = max(int(memory.total_nbytes * layer.nbytes / total) for layer in layers)
    return Recommendation(
        "", False, f"None: {needs}. A cut between its layers does not help: one of them needs {human_nbytes(largest)}."
    )
