"""The bare net or a Predictor?  Both measured on a real input: one-row requests of many callers, and whole batches."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.transfer import module_to
from mgpu_core.inference.predictor import Predictor
from mgpu_core.inference.requests import Call, Request
from mgpu_core.support.progress import Report, silent
from mgpu_core.support.tables import Lines, Table, human_seconds, text_of
from mgpu_core.tools.advise.benchmark import Budget
from mgpu_core.tools.advise.strategies import first_line
from mgpu_core.tools.advise.surroundings import busy_notes, random_state_kept
from mgpu_core.tools.explain.environ import environment
from mgpu_core.trees.module_copy import copy_module
from mgpu_core.trees.moves import is_spread
from mgpu_core.trees.nested import map_leaves, moved

__all__ = ["InferenceAdvice", "Load", "ServingWay", "advise_inference", "asked_for", "ways_of"]

FORMAT = "mgpu_core advice inference 1"
_WAITS_MS = (0.0, 2.0)
_ENOUGH = 0.95
"""The simplest way that reaches this share of the highest rate is preferred."""
_TURNS, _MOST_SECONDS = 2, 0.5
"""Turns of a measurement, and seconds of a turn.  The better turn counts: other work only makes a turn slower."""


@dataclass(frozen=True, slots=True)
class Load:
    """The rate and the times that callers saw.  Each caller waits for an answer before it asks again.

    Attributes:
        rate: answered rows per second.
        p50_s, p99_s: of the times from a call to its answer.
    """

    rate: float
    p50_s: float
    p99_s: float


@dataclass(slots=True)
class ServingWay:
    """The bare net (no ranks), or a Predictor.

    Attributes:
        one_row: of requests of one row, by many callers at once.
        own: of the script's own batches, by one caller; ``None`` where those have one row.
        error: why it could not be measured; else empty.
    """

    ranks: int
    max_batch: int = 0
    max_wait_ms: float = 0.0
    one_row: Load | None = None
    own: Load | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """As the table shows it."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        settings = f"max_batch={self.max_batch}, max_wait_ms={self.max_wait_ms:g}"
        return f"Predictor, {ranks}, {settings}" if self.ranks else "bare net"


@dataclass(frozen=True, slots=True)
class InferenceAdvice:
    """The measurements; ``print`` it for a table and the advice.

    Attributes:
        net: the name of its class.
        devices: one per rank, as text.
        rows: of the script's own batch.
        callers: of the one-row requests.
        ways: the bare net first, then those with fewer ranks.
    """

    net: str
    devices: tuple[str, ...]
    rows: int
    callers: int
    ways: tuple[ServingWay, ...]
    notes: tuple[str, ...]
    environment: dict[str, str]

    def best(self, load: str) -> ServingWay | None:
        """Return the first way that answers nearly as many rows per second as the fastest one.

        Args:
            load: ``"one_row"`` or ``"own"``.
        """
        rates = [(way, getattr(way, load).rate) for way in self.ways if getattr(way, load) is not None]
        most = max((rate for _, rate in rates), default=0.0)
        return next((way for way, rate in rates if rate >= _ENOUGH * most), None)

    @property
    def sentences(self) -> list[str]:
        """The advice for each load, with the code to use."""
        told = {f"one-row requests of {self.callers} callers": "one_row", f"batches of {self.rows} rows": "own"}
        return [self._sentence(what, load) for what, load in told.items() if self.best(load) is not None]

    def _sentence(self, what: str, load: str) -> str:
        best, bare = self.best(load), getattr(self.ways[0], load)
        assert best is not None
        if not best.ranks:
            return f"{what}: keep the bare net; no Predictor is more than 5 % faster."
        ratio = f"{getattr(best, load).rate / bare.rate:.2f} times" if bare else "an unknown multiple of"
        settings = f"max_batch={best.max_batch}, max_wait_ms={best.max_wait_ms:g}"
        use = "y = predict(x)  # in any thread" if load == "one_row" else "for y in predict.map(batches):\n        ..."
        return (
            f"{what}: use a Predictor on {', '.join(self.devices[: best.ranks])}: "
            f"{ratio} the rows per second of the bare net.\n"
            f"with mgpu_core.Predictor(net, {list(self.devices[: best.ranks])}, {settings}) as predict:\n    {use}"
        )

    def __str__(self) -> str:
        return text_of(self.lines)

    @property
    def lines(self) -> Lines:
        """The text, with its table."""
        one, whole = f"one row, {self.callers} callers", f"{self.rows} rows, 1 caller"
        has_own = any(way.own is not None for way in self.ways)
        head = ["way", "one row: rows/s", "p50", "p99", *([f"{self.rows} rows: rows/s", "p50", "p99"] * has_own)]
        rows = [[way.name, *_cells(way.one_row), *(_cells(way.own) * has_own)] for way in self.ways if not way.error]
        return [
            f"{self.net}, bare and in a Predictor on {', '.join(self.devices)}: {one}{f'; then {whole}' * has_own}",
            ", ".join(f"{name} {value}" for name, value in self.environment.items()),
            "",
            Table([head, *rows]),
            *["rows/s of batches in a Predictor: by predict.map; p50 and p99: of predict(x)"] * has_own,
            *(f"failed: {way.name}: {way.error}" for way in self.ways if way.error),
            *(f"note: {each}" for each in self.notes),
            "",
            *(self.sentences or ["no advice: every way failed"]),
        ]  # fmt: skip

    def to_json(self) -> str:
        """Return all numbers and the advice, indented for people."""
        content = {"format": FORMAT} | asdict(self) | {"advice": self.sentences}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _cells(load: Load | None) -> list[str]:
    return ["-"] * 3 if load is None else [f"{load.rate:.0f}", human_seconds(load.p50_s), human_seconds(load.p99_s)]


def ways_of(ranks: int, rows: int, callers: int, batches: Sequence[int] | None = None) -> list[ServingWay]:
    """Return the bare net, and Predictors with 1, 2, 4, ... ranks, some sizes of batches and two waits."""
    counts = sorted({ranks, *(1 << power for power in range(ranks.bit_length()))})
    sizes = sorted({max(1, callers // ranks), callers, rows} if batches is None else {*batches})
    return [ServingWay(0), *(ServingWay(count, size, wait) for count in counts for size in sizes for wait in _WAITS_MS)]


def advise_inference(
    net: Module, call: Call, devices: Sequence[torch.device], *,
    batches: Sequence[int] | None = None, callers: int = 16, seconds: float = 60.0, report: Report = silent,
) -> InferenceAdvice:  # fmt: skip
    """Measure the bare net on the first device, and Predictors on up to all devices.

    All of it happens on copies of the net, in eval mode.  A way that fails is reported as failed.

    Args:
        call: the arguments of one real call.
        devices: one per rank.
        batches: values of ``max_batch``; ``None``: some that suit the callers and the script's own batch.
        callers: of the requests of one row.
        seconds: for all of it; ways that the time does not suffice for are left out, with a note.
        report: of the ways that are measured.

    Raises:
        ValueError: the net is on several devices already, keeps a cache between calls, or the arguments have no rows
            along dimension 0.
    """
    if is_spread(net):
        raise ValueError("the net is on several devices already: mgpu_core.Predictor(net) runs it there as one rank")
    if kept := [name for name, value in call[1].items() if type(value).__name__.endswith("Cache")]:
        raise ValueError(
            f"the net keeps a cache between its calls ({', '.join(kept)}), so that one call alone cannot be measured: "
            "measure mgpu_core.Predictor(net, method='generate') on your own requests"
        )
    call = map_leaves(call, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    rows = Request(call).own_rows
    ways, notes = ways_of(len(devices), rows, callers, batches), busy_notes(devices)
    budget = Budget(seconds)
    part = min(_MOST_SECONDS, seconds / len(ways) / _TURNS / 3)
    with random_state_kept(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, way in enumerate(ways * _TURNS):
            if number and budget.left <= 0:
                if number < len(ways):
                    notes.append(f"the {seconds:g} s were over: {len(ways) - number} of {len(ways)} ways not measured")
                    del ways[number:]
                break
            report(number / len(ways) / _TURNS, f"turn {number // len(ways) + 1} of {_TURNS}: {way.name}")
            try:
                one_row, whole_batch = _measured(way, net, call, rows, devices, callers, part)
                way.one_row, way.own = _better(way.one_row, one_row), whole_batch and _better(way.own, whole_batch)
            except Exception as error:
                way.error, way.one_row, way.own = first_line(error), None, None
    return InferenceAdvice(
        type(net).__name__, tuple(map(str, devices)), rows, callers, tuple(ways), tuple(notes), environment()
    )


def _better(before: Load | None, now: Load) -> Load:
    return now if before is None or now.rate > before.rate else before


def _measured(
    way: ServingWay, net: Module, call: Call, rows: int, devices: Sequence[torch.device], callers: int, seconds: float
) -> tuple[Load, Load | None]:
    """Return what callers of one row saw, and one of whole batches."""
    one_row: Call = map_leaves(call, lambda leaf: leaf[:1] if isinstance(leaf, torch.Tensor) else leaf)
    if not way.ranks:
        bare = module_to(copy_module(net), devices[0]).eval()
        one = asked_for(partial(_call_bare, bare, one_row, devices[0]), 1, callers, seconds)
        return one, asked_for(partial(_call_bare, bare, call, devices[0]), rows, 1, seconds) if rows > 1 else None
    settings = {"max_batch": way.max_batch, "max_wait_ms": way.max_wait_ms}
    with Predictor(net, devices[: way.ranks], **settings) as predict:  # type: ignore[arg-type]
        one = asked_for(lambda: predict(*one_row[0], **one_row[1]), 1, callers, seconds)
        if rows == 1:
            return one, None
        whole_batch = asked_for(lambda: predict(*call[0], **call[1]), rows, 1, seconds)
        return one, Load(rows * _mapped(predict, call, seconds), whole_batch.p50_s, whole_batch.p99_s)


def _call_bare(net: Module, call: Call, device: torch.device) -> None:
    """Call the net on its device, and bring the outputs to where the inputs lie, as a Predictor does."""
    home = Request(call).device
    with torch.inference_mode():
        args, kwargs = moved(call, device)
        moved(net(*args, **kwargs), home)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def asked_for(ask: Callable[[], object], rows: int, callers: int, seconds: float) -> Load:
    """Let each caller, a thread, repeat its request for ``seconds``, at least three times.

    Raises:
        Exception: a call raised it.
    """
    for _ in range(2):
        ask()
    begin = time.perf_counter()

    def caller() -> list[float]:
        latencies: list[float] = []
        before = time.perf_counter()
        while len(latencies) < 3 or before < begin + seconds:
            ask()
            now = time.perf_counter()
            latencies.append(now - before)
            before = now
        return latencies

    with ThreadPoolExecutor(callers) as pool:
        futures = [pool.submit(caller) for _ in range(callers)]
        times = sorted(each for future in futures for each in future.result())
    rate = rows * len(times) / (time.perf_counter() - begin)
    return Load(rate, *(times[math.ceil(share * len(times)) - 1] for share in (0.5, 0.99)))


def _mapped(predict: Predictor, call: Call, seconds: float) -> float:
    """Return the batches per second that go through, several at a time."""
    begin, count = time.perf_counter(), 0

    def batches() -> Iterator[Any]:
        while time.perf_counter() < begin + seconds:
            yield call[0]

    asked = predict.map(batches()) if not call[1] else (predict(*args, **call[1]) for args in batches())
    for _ in asked:
        count += 1
    return count / (time.perf_counter() - begin)
