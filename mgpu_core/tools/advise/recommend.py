"""The recommendation: a pure function of the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_core.support.tables import human_seconds
from mgpu_core.tools.advise.host_share import HostShare
from mgpu_core.tools.advise.reasons import UPDATE
from mgpu_core.tools.advise.strategies import CAPTURED, DROP_IN, ENGINE, NAMES, ONE

__all__ = ["PIPELINE", "TENSOR_PARALLEL", "Recommendation", "recommend"]

PIPELINE, TENSOR_PARALLEL = "Pipeline", "TensorParallel"
"""The way for a model that does not fit on one device."""

ENOUGH = 1.05
"""Within this factor of the fastest, simpler is better."""

IMPOSSIBLE = 4.0
"""So many times the ranks: neither caches nor a fused update make so much of each of them."""

HELD_UP = 1.5
"""If a step takes this many times as long as one with more rows, other programs disturbed the measurement."""

_HOW = {
    ONE: "Keep the plain loop",
    DROP_IN: "model = mgpu_core.DataParallel(net, device_ids)",
    ENGINE: "step = mgpu_core.TrainStep(net, loss_fn, optimizer, device_ids)",
    CAPTURED: "step = mgpu_core.TrainStep(net, loss_fn, optimizer, device_ids, capture=True)",
}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation.

    Attributes:
        way: empty if none could be measured, or not as it is.
        text: sentences.
    """

    way: str
    text: str


def recommend(
    medians: Mapping[str, float],
    *,
    gpus: int = 0,
    host: HostShare | None = None,
    loader_s: float | None = None,
    reason: str = "",
    device_count: int = 1,
    ranks: int = 2,
    of_more_rows: Mapping[str, float] | None = None,
) -> Recommendation:
    """Return the simplest way within 5 % of the fastest, at the sample's own batch.

    Args:
        medians: seconds of a step, of each way that ran.
        gpus: how many different ones the ranks are on; 0 off GPUs.
        host: a rank's step on the host and on its GPU.
        loader_s: seconds in which the loader has such a batch.
        reason: the name of the main cost of many ranks.
        device_count: number of distinct devices.
        ranks: how many there are.
        of_more_rows: seconds of a step with a larger batch.
    """
    if not medians:
        return Recommendation("", "None: no way could be measured.")
    if way := _impossible(medians, ranks):
        return Recommendation("", _mismeasured(way, medians, ranks))
    if way := next((way for way, more in (of_more_rows or {}).items() if more * HELD_UP < medians.get(way, 0.0)), ""):
        return Recommendation("", _held_up(way, medians[way], (of_more_rows or {})[way]))
    fastest = min(medians.values())
    way = next(name for name in NAMES if name in medians and medians[name] <= ENOUGH * fastest)
    told = [_choice(way, medians)]
    if loader_s is not None and loader_s > fastest:
        told.insert(0, _slow_loader(loader_s, fastest))
    if reason == UPDATE:
        told.append(_slow_update(device_count))
    if host is not None and gpus > 1 and host.gpus < gpus:
        told.append(_waiting_gpus(host, gpus))
    return Recommendation(way, "\n".join(told))


def _impossible(medians: Mapping[str, float], ranks: int) -> str:
    """Return the fastest eager way if it is faster than this number of ranks can be, otherwise an empty text.

    Captured ways are left out: they save launches, which the one device pays too.
    """
    eager = [name for name in (DROP_IN, ENGINE) if name in medians]
    if ONE not in medians or not eager:
        return ""
    way = min(eager, key=medians.__getitem__)
    return way if medians[ONE] / medians[way] > IMPOSSIBLE * ranks else ""


def _mismeasured(way: str, medians: Mapping[str, float], ranks: int) -> str:
    return (
        f"None: {way} was measured as {medians[ONE] / medians[way]:.1f} times as fast as one device, which "
        f"{ranks} {'rank' if ranks == 1 else 'ranks'} cannot be. "
        "Something else held one device up: repeat it on a quiet machine."
    )


def _held_up(way: str, seconds: float, of_more_rows: float) -> str:
    return (
        f"None: {way} took {human_seconds(seconds)}, and with more rows {human_seconds(of_more_rows)}. Something else "
        "held it up: repeat it on a quiet machine."
    )


def _choice(way: str, medians: Mapping[str, float]) -> str:
    ran = {name: seconds for name, seconds in medians.items() if name != way}
    text = f"{way}: {human_seconds(medians[way])} a step"
    if way != ONE and ONE in medians:
        text += f", {medians[ONE] / medians[way]:.2f} times as fast as one device"
    fastest = min(ran, key=ran.__getitem__, default=way)
    if fastest != way and ran[fastest] < medians[way]:
        text += f"; {fastest} is {medians[way] / ran[fastest] - 1:.0%} faster, too little to change more of the loop"
    return f"{text}. {_HOW[way]}." if way == ONE else f"{text}: {_HOW[way]}"


def _slow_loader(loader_s: float, fastest: float) -> str:
    return (
        f"First the loader: it takes {human_seconds(loader_s)} for a batch and the best step {human_seconds(fastest)}, "
        "so more ranks will not help until loading is faster."
    )


def _slow_update(device_count: int) -> str:
    fewer = "Also fewer updates: a larger batch, or TrainStep(accumulate=4), which makes one for four batches"
    if device_count == 1:
        return f"{fewer}."
    sharded = f'shard="optimizer", with which each of {device_count} devices makes its part (with mgpu_core.optim)'
    return f"{fewer}; and {sharded}."


def _waiting_gpus(host: HostShare, gpus: int) -> str:
    busy = f"{host.gpus} of {gpus} GPUs" if host.gpus else "not even one GPU"
    return (
        f"The host is too slow for these GPUs: with {host.rows} rows each, one process keeps {busy} busy. Replays of "
        "graphs help (capture=True), more rows a GPU, fewer and larger operations (torch.compile), or a process per "
        "GPU: TrainStep(process_group=...) or DDP under torchrun."
    )
