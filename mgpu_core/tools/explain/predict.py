"""A recorded step at another number of GPUs: pure functions of a profile and a machine.

A step is: scatter, broadcast of the module (the drop-in's), forward, backward overlapped with the all-reduces of the
buckets, update, gather; and the host's own time.  One thread of a process asks for the forwards of all its GPUs, one
after the other, and a thread a GPU for their backwards: where that takes longer than a GPU computes, the GPUs wait.
A bucket is all-reduced as soon as it is ready and the one before is done; the rest after backward is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from mgpu_core.tools.explain.cost import (
    Cost,
    StepProfile,
    all_reduce_cost,
    broadcast_seconds,
    gather_seconds,
    scatter_seconds,
)
from mgpu_core.tools.explain.topology import HostMemory, Machine

__all__ = ["SCALINGS", "Plan", "Prediction", "exposed_seconds", "predict_step"]

SCALINGS = ("weak", "strong")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step is carried to another size.

    Attributes:
        machine: on which.
        scaling: ``weak``: each GPU keeps its rows; ``strong``: the batch keeps its rows, and GPUs share them.
        overlap: buckets travel during backward; otherwise after it.
        algorithm: of the all-reduce.
    """

    machine: Machine
    scaling: str = "weak"
    overlap: bool = True
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an unknown scaling."""
        if self.scaling not in SCALINGS:
            raise ValueError(f"unknown scaling {self.scaling!r}: wanted one of {', '.join(SCALINGS)}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step with so many GPUs; seconds.

    Attributes:
        gpus: how many.
        rows: of the whole batch; with weak scaling of ranks that had unequally many, no whole number.
        compute_s: forward and backward of one GPU.
        latency_s, transfer_s: the exposed part of the all-reduces, split by cause.
        update_s: of the optimizer.
        broadcast_s: parameters and buffers from rank 0 to all others, where each step does that.
        input_s: scatter and gather.
        host_s: the host's own time, and that for which the GPUs of a process wait for it.
        efficiency: rows a second, over so many times those of one GPU.
    """

    gpus: int
    rows: float
    compute_s: float
    latency_s: float
    transfer_s: float
    update_s: float
    broadcast_s: float
    input_s: float
    host_s: float
    efficiency: float = 1.0

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return self.latency_s + self.transfer_s

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_s + self.update_s + self.broadcast_s + self.input_s + self.host_s

    @property
    def rows_per_second(self) -> float:
        """Throughput of all GPUs together."""
        return self.rows / self.step_s

    @property
    def bottleneck(self) -> str:
        """The largest part of the step."""
        parts = {
            "compute": self.compute_s + self.update_s,
            "communication latency": self.latency_s,
            "communication bandwidth": self.transfer_s,
            "broadcast of the module": self.broadcast_s,
            "input": self.input_s,
            "host": self.host_s,
        }
        return max(parts, key=parts.__getitem__)


def exposed_seconds(ready: Sequence[float], taken: Sequence[float], backward: float) -> float:
    """Return how long after the end of backward the last bucket is there.

    Args:
        ready: seconds from the begin of backward to each bucket, in the order in which they travel.
        taken: seconds of each all-reduce, which begins when its bucket is ready and the one before it is done.
        backward: seconds of backward.
    """
    done = 0.0
    for each, seconds in zip(ready, taken, strict=True):
        done = max(done, each) + seconds
    return max(0.0, done - backward)


def predict_step(profile: StepProfile, gpus: int, plan: Plan) -> Prediction:
    """Predict the step on ``gpus`` GPUs, relative to one.

    Raises:
        ValueError: numbers that the machine cannot have (:meth:`Topology.shape`), or fewer rows than GPUs.
    """
    single, found = _predict(profile, 1, plan), _predict(profile, gpus, plan)
    efficiency = found.rows_per_second / (gpus * single.rows_per_second)
    return replace(found, efficiency=efficiency)


def _predict(profile: StepProfile, gpus: int, plan: Plan) -> Prediction:
    scale = gpus / profile.ranks if plan.scaling == "weak" else 1.0  # of the whole batch
    rows = profile.rows * scale  # weak: as many a GPU as were recorded on the average
    if rows < gpus:
        raise ValueError(f"{gpus} GPUs share {rows:g} rows: some have none (--scaling weak keeps the rows of each)")
    slower = _slowdown(profile, gpus, plan)
    cost = [all_reduce_cost(plan.algorithm, gpus, bucket.nbytes, plan.machine) for bucket in profile.buckets]
    exposed = _exposed(profile, cost, slower, plan)
    total = sum(each.seconds for each in cost)
    latency = exposed * sum(each.latency_s for each in cost) / total if total else 0.0
    return Prediction(
        gpus,
        rows,
        compute_s=slower * (profile.forward_seconds + _turns(profile, plan) * profile.backward_seconds),
        latency_s=latency,
        transfer_s=exposed - latency,
        update_s=profile.update_seconds,
        broadcast_s=_broadcast(profile, gpus, plan),
        input_s=_input(profile, gpus, scale, plan),
        host_s=profile.host_overhead_seconds + _waiting(profile, gpus, slower, plan),
    )


def _waiting(profile: StepProfile, gpus: int, slower: float, plan: Plan) -> float:
    """Return how much longer one process asks for the work of all its GPUs than each of them computes."""
    if isinstance(plan.machine, HostMemory):
        return 0.0  # CPU ranks compute in the threads that ask
    of_a_process = min(gpus, plan.machine.gpus_per_node)
    asked = of_a_process * profile.host_forward_seconds + profile.host_backward_seconds
    return max(0.0, asked - slower * (profile.forward_seconds + profile.backward_seconds))


def _input(profile: StepProfile, gpus: int, scale: float, plan: Plan) -> float:
    """Return the cost of scatter and gather; without them it is zero."""
    scatter = scatter_seconds(gpus, profile.scatter_nbytes * scale, plan.machine) if profile.scatter_nbytes else 0.0
    return scatter + (gather_seconds(gpus, profile.gather_nbytes * scale, plan.machine) if profile.gather_nbytes else 0)


def _broadcast(profile: StepProfile, gpus: int, plan: Plan) -> float:
    """Return the cost of broadcasts; each node has a process that broadcasts to its own ranks, at the same time."""
    if not profile.broadcast_nbytes:
        return 0.0
    ranks = gpus if isinstance(plan.machine, HostMemory) else plan.machine.shape(gpus)[1]
    return broadcast_seconds(ranks, profile.broadcast_nbytes, plan.machine)


def _turns(profile: StepProfile, plan: Plan) -> int:
    """Return how many backwards take the time of one rank's: CPU ranks take turns, GPUs do not wait."""
    return profile.backwards_in_turn if isinstance(plan.machine, HostMemory) else 1


def _slowdown(profile: StepProfile, gpus: int, plan: Plan) -> float:
    """Return the slowdown of the largest rank's compute: in proportion to its rows; CPU ranks share the cores."""
    rows = 1.0 if plan.scaling == "weak" else ceil(profile.rows / gpus) / ceil(profile.rows / profile.ranks)
    return rows * gpus / profile.ranks if isinstance(plan.machine, HostMemory) else rows


def _exposed(profile: StepProfile, cost: Sequence[Cost], slower: float, plan: Plan) -> float:
    """On the host nothing is hidden: the cores that add are those that compute."""
    taken = [each.seconds for each in cost]
    if not plan.overlap or isinstance(plan.machine, HostMemory):
        return sum(taken)
    backward = slower * profile.backward_seconds
    return exposed_seconds([bucket.ready_fraction * backward for bucket in profile.buckets], taken, backward)
