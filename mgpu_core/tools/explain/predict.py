"""A recorded step on another number of GPUs: a pure function of a profile and a topology.

A step is: scatter, broadcast of the module (the drop-in's), forward, backward overlapped with the all-reduces of the
buckets, update, gather; and the host's own time.  One thread of a process asks for the forwards of all its GPUs, one
after the other, and a thread a GPU for their backwards: where that takes longer than a GPU computes, the GPUs wait.
A bucket is all-reduced as soon as it is ready and the one before is done; the rest after backward is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from mgpu_core.tools.explain.cost import Cost, all_reduce, broadcast, scatter
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.topology import Topology

__all__ = ["SCALINGS", "Prediction", "exposed_seconds", "predict_step"]

SCALINGS = ("weak", "strong")


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
    for ready_at, seconds in zip(ready, taken, strict=True):
        done = max(done, ready_at) + seconds
    return max(0.0, done - backward)


def predict_step(profile: StepProfile, gpus: int, topology: Topology, scaling: str = "weak") -> Prediction:
    """Predict the step on ``gpus`` GPUs, relative to one.

    Args:
        profile: recorded on GPUs of the same kind.
        gpus: how many.
        topology: their links.
        scaling: ``weak``: each GPU keeps its rows; ``strong``: the batch keeps its rows, and GPUs share them.

    Raises:
        ValueError: numbers that the topology cannot have (:meth:`Topology.shape`), fewer rows than GPUs, or an unknown
            scaling.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"unknown scaling {scaling!r}: wanted one of {', '.join(SCALINGS)}")
    topology.shape(gpus)  # refuses what it cannot have, also where nothing travels
    single, predicted = (_predict(profile, count, topology, scaling) for count in (1, gpus))
    efficiency = predicted.rows_per_second / (gpus * single.rows_per_second)
    return replace(predicted, efficiency=efficiency)


def _predict(profile: StepProfile, gpus: int, topology: Topology, scaling: str) -> Prediction:
    weak = scaling == "weak"
    scale = gpus / profile.ranks if weak else 1.0  # of the whole batch
    rows = profile.rows * scale  # weak: as many a GPU as were recorded on the average
    if rows < gpus:
        raise ValueError(f"{gpus} GPUs share {rows:g} rows: some have none (--scaling weak keeps the rows of each)")
    # Of the GPU with most rows.
    slower = 1.0 if weak else ceil(profile.rows / gpus) / ceil(profile.rows / profile.ranks)
    backward = slower * profile.backward_seconds
    compute = slower * profile.forward_seconds + backward
    exposed = _exposed(profile, gpus, topology, backward)
    moved = [each for each in (profile.scatter_nbytes, profile.gather_nbytes) if each]
    return Prediction(
        gpus,
        rows,
        compute_s=compute,
        latency_s=exposed.latency_s,
        transfer_s=exposed.transfer_s,
        update_s=profile.update_seconds,
        broadcast_s=broadcast(topology, gpus, profile.broadcast_nbytes) if profile.broadcast_nbytes else 0.0,
        input_s=sum(scatter(topology, gpus, nbytes * scale) for nbytes in moved),
        host_s=profile.host_overhead_seconds + _waiting(profile, min(gpus, topology.gpus_per_node), compute),
    )


def _exposed(profile: StepProfile, gpus: int, topology: Topology, backward: float) -> Cost:
    """Return the part of the all-reduces that ends after so many seconds of backward, split as all of them are."""
    cost = [all_reduce(topology, gpus, bucket.nbytes) for bucket in profile.buckets]
    ready = [bucket.ready_fraction * backward for bucket in profile.buckets]
    exposed = exposed_seconds(ready, [each.seconds for each in cost], backward)
    total = sum(each.seconds for each in cost)
    latency = exposed * sum(each.latency_s for each in cost) / total if total else 0.0
    return Cost(latency, exposed - latency)


def _waiting(profile: StepProfile, gpus: int, compute: float) -> float:
    """Return how much longer one process asks for the work of all its GPUs than each of them computes."""
    return max(0.0, gpus * profile.host_forward_seconds + profile.host_backward_seconds - compute)
