"""The cost of recording: a step that is not recorded, and one that is.

Three rows. `span`: the time of one span with recording off, beside a limit of 100 ns. `off`: all looks at the flag that
one step of SimpleNet makes, beside that step. `on`: a step of the CNN that is recorded, beside the same step that is
not; it is the recording of a step inside a training, so the work at the end of a recording is not in it.
"""

import argparse
import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence

import torch
from torch.nn import functional

from mgpu_core import TrainStep
from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, at_most
from mgpu_core.tools.bench.options import parse_count
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, timed
from mgpu_core.tools.bench.training import Step, Trainee, TrainRow
from mgpu_core.tools.explain.clock import EventClock
from mgpu_core.trace import tracer
from mgpu_core.trace.events import ALL_RANKS, Span
from mgpu_core.trace.profilers import name_in_profilers
from mgpu_core.trace.tracer import current_step, in_step, is_tracing, span, tracing

LIMIT_SECONDS = 100e-9
LOOPS = 10_000
STEPS = {"simplenet": 20, "cnn": 2}
BATCH = {"simplenet": 64, "cnn": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Return the number of ranks."""
    parser.add_argument("--ranks", type=parse_count, default=2, metavar="N", help="default: %(default)s")


def plan(options: argparse.Namespace) -> RowPlan:
    """Return the three rows."""
    rows: list[dict[str, Label]] = [{"what": what, "ranks": options.ranks} for what in ("span", "off", "on")]
    return RowPlan(rows, _contests(rows, options.ranks, options.repeats))


def _contests(rows: Sequence[dict[str, Label]], ranks: int, repeats: int) -> Generator[Contest]:
    schedule = Timing(repeats, warmup=2)
    limit = Contestant(lambda: LIMIT_SECONDS, lambda: 0)
    one_span = Contestant(_many(_spans), _is_off)
    yield Contest(rows[0], {OURS: one_span, "limit": limit}, schedule)
    with contextlib.ExitStack() as stack:
        small = _trainee("simplenet", ranks, stack)
        events = _entries_of(small)
        spans = sum(isinstance(event, Span) for event in events)
        own, others = _many(_spans, spans), _many(_questions, len(events) - spans)
        sides = {OURS: Contestant(lambda: own() + others(), _is_off), "step": _contestant(small, "simplenet")}
        yield Contest(rows[1], sides, schedule)
    with contextlib.ExitStack() as stack:
        large = _trainee("cnn", ranks, stack)
        plain = _contestant(large, "cnn")
        sides = {OURS: Contestant(_recorded(plain.run), plain.wrong), "step": plain}
        yield Contest(rows[2], sides, schedule)


def _spans(count: int) -> None:
    for _ in range(count):
        with span("forward", 1, None):
            pass


def _questions(count: int) -> None:
    """Ask what other events ask: whether a recording is on, twice, and the current step."""
    for _ in range(count):
        is_tracing()
        with in_step(current_step()):
            pass
        if tracer.recording is not None:
            raise RuntimeError("nothing is recorded here")


def _many(looks: Callable[[int], object], count: int = 1) -> Callable[[], float]:
    """Return the seconds of one time in many; those of the loop around them are taken off."""
    loop, empty = timed(lambda: looks(LOOPS)), timed(lambda: _loop(LOOPS))
    return lambda: max(0.0, loop() - empty()) / LOOPS * count


def _loop(count: int) -> None:
    for _ in range(count):
        pass


def _is_off() -> int:
    return int(is_tracing())


def _trainee(model: str, ranks: int, stack: contextlib.ExitStack) -> Trainee:
    def ours(network: torch.nn.Module, optimizer: torch.optim.SGD) -> Step:
        step = TrainStep(network, functional.cross_entropy, optimizer, ["cpu"] * ranks)
        return stack.enter_context(contextlib.closing(step))

    return Trainee(TrainRow(model, BATCH[model], ranks, STEPS[model], "cpu"), ours)


def _contestant(trainee: Trainee, model: str) -> Contestant:
    salts, run = itertools.count(1), timed(trainee.train)
    return Contestant(lambda: run() / STEPS[model], lambda: trainee.wrong(next(salts)))


def _entries_of(trainee: Trainee) -> list[object]:
    """Return the entries that one step would leave in a recording."""
    trainee.train()
    with tracing(steps=1) as trace:
        trainee.train()
    heads = [event for event in trace.events if isinstance(event, Span) and event.rank == ALL_RANKS]
    assert [event.step for event in heads].count("train_step") == 1
    return list(trace.events)


def _recorded(run: Callable[[], float]) -> Callable[[], float]:
    def recorded() -> float:
        with tracing(EventClock(), name_in_profilers):
            return run()

    return recorded


CASE = Case(
    name="explain_overhead",
    summary="what recording costs: a span that is off, a SimpleNet step that is, a CNN step that is recorded",
    peers=("limit", "step"),
    plan=plan,
    add_arguments=add_arguments,
    unit="us",
    bounds=(
        at_most(1.0, "limit", what="span"),
        at_most(0.005, "step", what="off"),
        at_most(1.05, "step", what="on"),
    ),
)
