"""A recorded step with its layers cut: the time of one step over some GPUs.

Each GPU has an equal part of the forward, of the backward and of the update.  After a layer whose outputs are joined,
all GPUs wait for an all-reduce, once in the forward and once in the backward; nothing hides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_core.tools.explain.cost import all_reduce_seconds
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.topology import Topology

__all__ = ["TensorParallelPrediction", "predict_tensor_parallel"]


@dataclass(frozen=True, slots=True)
class TensorParallelPrediction:
    """One step with a part of each layer per GPU.

    Attributes:
        gpus: how many.
        step_s: seconds of the step.
        compute_s: of its forward and backward.
        joint_s: of its all-reduces.
        steps_per_second: throughput.
        speedup: relative to one GPU.
    """

    gpus: int
    step_s: float
    compute_s: float
    joint_s: float
    steps_per_second: float
    speedup: float


def predict_tensor_parallel(profile: StepProfile, gpus: int, machine: Topology) -> TensorParallelPrediction:
    """Predict one rank's step, with its rows, over ``gpus`` parts of its layers.

    Raises:
        ValueError: a number of GPUs that the machine cannot have; several GPUs and a step without ``joints``.
    """
    if gpus > 1 and not (profile.joints and profile.joint_nbytes):
        raise ValueError(
            f"{profile.name}: the layers after which GPUs meet are not known: --joints and --joint-nbytes, or a step "
            "that was recorded over a TensorParallel"
        )
    machine.shape(gpus)
    alone = profile.forward_seconds + profile.backward_seconds
    each = all_reduce_seconds("auto", gpus, profile.joint_nbytes / max(1, profile.joints), machine)
    compute, joint = alone / gpus, 2 * profile.joints * each
    rest = profile.host_overhead_seconds
    step = compute + joint + profile.update_seconds / gpus + rest
    whole = alone + profile.update_seconds + rest
    return TensorParallelPrediction(gpus, step, compute, joint, 1 / step, whole / step)
