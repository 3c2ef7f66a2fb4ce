"""A model that does not fit on one device: where to cut it."""

from __future__ import annotations

import math

from torch.nn import Module

from mgpu_core.devices.plug_ins import total_nbytes
from mgpu_core.pipeline.balance import cut_layers, measured_layers
from mgpu_core.support.tables import human_nbytes
from mgpu_core.tensor_parallel.plan import read_plan, suggested_plan
from mgpu_core.tools.advise.memory import Memory
from mgpu_core.tools.advise.plan import AdvicePlan
from mgpu_core.tools.advise.recommend import PIPELINE, TENSOR_PARALLEL, Recommendation
from mgpu_core.trees.blocks import blocks_of
from mgpu_core.trees.module_copy import copy_module

__all__ = ["capacity_of", "recommended_cut"]

_MOST_PARTS = 16


def capacity_of(plan: AdvicePlan) -> int | None:
    """Return the bytes of the smallest device: as given, or of the accelerators; ``None``: unknown."""
    if plan.device_nbytes is not None:
        return plan.device_nbytes
    capacities = [total_nbytes(each) for each in plan.distinct_devices]
    return min((nbytes for nbytes in capacities if nbytes is not None), default=None)


def recommended_cut(plan: AdvicePlan, memory: Memory, capacity: int) -> Recommendation:
    """Return the fewest parts that fit, cut so that the largest needs the least memory.

    A part needs its share, by parameters, buffers and the tensors that autograd keeps, of the rank's memory.
    Micro-batches need less, since not all of them are in a stage at once.
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
                f"step = mgpu_core.TrainStep(pipe, loss_fn, optimizer){_in_shards(net, memory, capacity)}"
            )
            return Recommendation(PIPELINE, text)
    largest = max(int(memory.total_nbytes * layer.nbytes / total) for layer in layers)
    between = f"A cut between its layers does not help: one of them needs {human_nbytes(largest)}."
    return _of_layers(net, memory, capacity, f"{needs}. {between}")


def _in_shards(net: Module, memory: Memory, capacity: int) -> str:
    """Name the step whose devices keep an N-th of parameters, gradients and state each, if a few of them suffice.

    Whole on each are the layers outside of the blocks, and two blocks, with their gradients.
    """
    blocks = [sum(each.nbytes for each in block.parameters()) for block in blocks_of(net).values()]
    outside = sum(each.nbytes for each in net.parameters()) - sum(blocks)
    room = capacity - memory.activations_nbytes - 2 * outside - 4 * max(blocks, default=0)
    held = memory.total_nbytes - memory.activations_nbytes
    if held > room * _MOST_PARTS:
        return ""
    return (
        f". Or leave it in one piece, of which each of {math.ceil(held / room)} devices keeps a part: "
        'mgpu_core.TrainStep(net, loss_fn, optimizer, device_ids, shard="parameters"), with mgpu_core.optim'
    )


def _of_layers(net: Module, memory: Memory, capacity: int, why: str) -> Recommendation:
    """Return the fewest ranks for which the module fits with its layers cut by a plan.

    The share of the Parameters that a plan cuts is divided, with their gradients and the optimizer's state; what
    autograd keeps counts whole.
    """
    tp_plan = getattr(net, "tp_plan", None)
    plan = tp_plan or suggested_plan(net)
    held, kept = memory.total_nbytes - memory.activations_nbytes, memory.activations_nbytes
    total = sum(each.nbytes for each in net.parameters())
    for ranks in range(2, _MOST_PARTS + 1):
        try:
            cuts = read_plan(net, plan, ranks).cuts if plan else {}
        except ValueError:  # so many ranks cannot share a layer
            continue
        cut = sum(each.nbytes for name, each in net.named_parameters() if name in cuts) / total
        fullest = int(held * (1 - cut + cut / ranks)) + kept
        if fullest <= capacity:
            given = "" if tp_plan else f", {plan}"
            check = "" if tp_plan else "; between a column and a row the module must compute each feature by itself"
            text = (
                f"{TENSOR_PARALLEL}: {why} Cut its layers over {ranks} devices, of which the fullest needs about "
                f"{human_nbytes(fullest)}: tp = mgpu_core.TensorParallel(net, device_ids{given}){check}"
            )
            return Recommendation(TENSOR_PARALLEL, text)
    return Recommendation("", f"None: {why}")
