"""A recorded step as a pipeline: the time of one step over some stages and micro-batches.

Each stage has an equal part of the forward and of the backward, and a micro-batch takes its part of the rows' time.  A
value that crosses a border takes alpha + n x beta seconds of its link while both stages compute; its gradient takes as
long on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu_core.pipeline.schedules import FORWARD, Action, bubble, plan
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.topology import Topology

__all__ = ["PipelinePrediction", "predict_pipeline", "seconds_of"]


@dataclass(frozen=True, slots=True)
class PipelinePrediction:
    """One step with a stage per GPU.

    Attributes:
        gpus, chunks: how many stages and micro-batches.
        step_s: seconds of the step.
        idle: the share of the stages' time, 0 to 1, in which they wait during forward and backward.
        bubble: the same if nothing had to travel, and forwards took as long as backwards.
        rows_per_second: throughput.
        speedup: relative to one GPU.
    """

    gpus: int
    chunks: int
    step_s: float
    idle: float
    bubble: float
    rows_per_second: float
    speedup: float


def seconds_of(
    actions: Sequence[Action], seconds: Callable[[int, str], float], transfer: Callable[[int], float]
) -> float:
    """Return the time from the first action's begin to the last one's end, with a worker per stage.

    Args:
        actions: a plan.
        seconds: of an action of a stage.
        transfer: of a value, or of its gradient, between a stage and the one after it.
    """
    stages = 1 + max(action.stage for action in actions)
    free = [0.0] * stages  # when each worker has ended its last action
    done: dict[tuple[str, int, int], float] = {}
    for _, stage, kind, batch in actions:
        begin = free[stage]
        before = stage - 1 if kind == FORWARD else stage + 1
        if 0 <= before < stages:
            begin = max(begin, done[kind, before, batch] + transfer(min(stage, before)))
        free[stage] = done[kind, stage, batch] = begin + seconds(stage, kind)
    return max(free)


def predict_pipeline(
    profile: StepProfile, gpus: int, chunks: int, machine: Topology, schedule: str = "1f1b"
) -> PipelinePrediction:
    """Predict one rank's step, with its rows, over ``gpus`` stages.

    Raises:
        ValueError: fewer rows than chunks; a number of GPUs that the machine cannot have; several stages of a step
            without ``border_nbytes``.
    """
    rows = profile.rows / profile.ranks
    if chunks > rows:
        raise ValueError(f"{chunks} chunks of {rows:g} rows: some have none")
    if gpus > 1 and not profile.border_nbytes:
        raise ValueError(
            f"{profile.name}: the bytes that cross a border between stages are not known: --border-nbytes, or a step "
            "that was recorded over a Pipeline"
        )
    machine.shape(gpus)
    actions = plan(gpus, chunks, schedule)
    forward, backward = (each / gpus / chunks for each in (profile.forward_seconds, profile.backward_seconds))
    nbytes = profile.border_nbytes / profile.ranks / chunks

    def transfer(stage: int) -> float:
        link = machine.within if (stage + 1) % machine.gpus_per_node else machine.between
        assert link is not None  # or shape() had raised
        return link.alpha_s + nbytes * link.beta_s_per_byte(nbytes)

    passes = seconds_of(actions, lambda _, kind: forward if kind == FORWARD else backward, transfer)
    compute = profile.forward_seconds + profile.backward_seconds
    step = passes + profile.update_seconds / gpus + profile.host_overhead_seconds
    alone = compute + profile.update_seconds + profile.host_overhead_seconds
    return PipelinePrediction(
        gpus, chunks, step, 1 - compute / (gpus * passes), bubble(actions, gpus), rows / step, alone / step
    )
