"""A training step of a transformer that is cut over two CPU ranks, each with one thread inside its operations.

Ours is `TrainStep` over a `Pipeline` of two stages. `independent` is the most that two cores can do: two processes
train the whole network side by side, with one thread each, and their time is for the rows of both. `pipelining` is
`torch.distributed.pipelining`: a process per stage over gloo, schedule 1F1B.

The row `idle` is of one recorded step: the time in which a stage waits, beside that of the schedule with equal slots.
The row `two threads` is of the same network in evaluation, placed by `place`: two threads at once, each with
several calls one after the other as in `generate`, beside one thread after the other.
"""

import argparse
import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mgpu_core import Pipeline, TrainStep, explain, place
from mgpu_core.tools.bench.case import Case, Contest, RowPlan, at_most
from mgpu_core.tools.bench.gloo import GlooTeam
from mgpu_core.tools.bench.options import add_counts, parse_count
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, timed
from mgpu_core.tools.bench.transformer import LR, OwnNetwork, OwnStage, PipelineTask, loss_fn, wrong_values
from mgpu_core.tools.explain.timeline import Timeline, timelines_of

STAGES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Return the network, the batch and the cut."""
    add_counts(parser, layers=(12, "transformer blocks"), batch=(32, "rows of 128 tokens"), chunks=(8, "micro-batches"))
    parser.add_argument(
        "--cut", type=parse_count, metavar="N", help="the block of the cut (default: one past the middle)"
    )


def plan(options: argparse.Namespace) -> RowPlan:
    """Return the step, and the time in which its stages wait."""
    same = {"stages": STAGES, "layers": options.layers, "batch": options.batch, "chunks": options.chunks}
    kinds = ["step", "idle", *["two threads"] * ("in_turn" in options.peers)]
    rows: list[dict[str, Any]] = [{"what": what} | same for what in kinds]
    return RowPlan(rows, _contests(rows, options))


def _contests(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Generator[Contest]:
    task = PipelineTask(options.layers, options.batch, options.chunks, options.cut or options.layers // 2 + 1)
    schedule = Timing(options.repeats, 2)
    with contextlib.ExitStack() as stack:
        yield Contest(rows[0], _contestants(task, options.peers, stack), schedule)
    with contextlib.ExitStack() as stack:
        ours = _ours(task, stack, itertools.count(1))
        idle = _Idle(ours)
        sides = {OURS: Contestant(idle.waited, ours.wrong), "schedule": Contestant(idle.by_schedule, lambda: 0)}
        yield Contest(rows[1], sides, schedule)
    if len(rows) > 2:
        yield Contest(rows[2], _two_threads(task), schedule)


def _two_threads(task: PipelineTask) -> Mapping[str, Contestant]:
    """Return the times of the calls of two threads: at once, and one after the other."""
    network, (tokens, _) = task.network().eval(), task.tokens(0)
    parts = tokens.split(max(1, task.batch // task.chunks))
    with torch.inference_mode():
        wanted = list(map(network, parts))
    place(network, ["cpu"] * STAGES, [str(task.cut)])
    gradients: dict[int, list[torch.Tensor]] = {}

    def call() -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode():
            gradients[threading.get_ident()] = list(map(network, parts))

    def at_once() -> None:
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def in_turn() -> None:
        for _ in range(2):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    def wrong() -> int:
        pairs = [pair for each in gradients.values() for pair in zip(each, wanted, strict=True)]
        return sum(not torch.equal(*pair) for pair in pairs)

    return {OURS: Contestant(timed(at_once), wrong), "in_turn": Contestant(timed(in_turn), wrong)}


def _contestants(task: PipelineTask, peers: Sequence[str], stack: contextlib.ExitStack) -> Mapping[str, Contestant]:
    salts = itertools.count(1)
    sides = {OURS: _ours(task, stack, salts)}
    for name, kind, rows in (("independent", OwnNetwork, STAGES), ("pipelining", OwnStage, 1)):
        if name in peers:
            team = stack.enter_context(GlooTeam(STAGES, kind))
            team.prepare(task)
            sides[name] = Contestant(_divided(team, rows), partial(_wrong, team, salts))
    return sides


def _wrong(team: GlooTeam, salts: Iterator[int]) -> int:
    return team.wrong(next(salts))


def _divided(team: GlooTeam, by: int) -> Callable[[], float]:
    return lambda: team.run() / by


def _ours(task: PipelineTask, stack: contextlib.ExitStack, salts: "itertools.count[int]") -> Contestant:
    step, batch = _made(task), task.tokens(0)
    stack.callback(step.close)

    def wrong() -> int:
        salt = next(salts)
        fresh = _made(task)
        with contextlib.closing(fresh):
            fresh(*task.tokens(salt))
            return wrong_values(task, dict(fresh.module.named_parameters()), salt)

    return Contestant(timed(lambda: step(*batch)), wrong)


class _Idle:
    """Seconds per stage in which it waits, of a recorded step."""

    def __init__(self, ours: Contestant) -> None:
        self._ours = ours
        self._last: Timeline | None = None

    def waited(self) -> float:
        """Record a step."""
        with explain() as trace:
            self._ours.run()
        (self._last,) = timelines_of(trace.step())
        return self._last.idle * self._last.seconds

    def by_schedule(self) -> float:
        """Return the bubble of the step that was recorded last."""
        assert self._last is not None
        return self._last.bubble * self._last.seconds


def _made(task: PipelineTask) -> TrainStep:
    net = Pipeline(task.network(), ["cpu"] * STAGES, split_points=[str(task.cut)], chunks=task.chunks)
    return TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=LR), workers="threads")


CASE = Case(
    name="pipeline",
    summary="TrainStep over a Pipeline of two CPU ranks: a transformer with micro-batches in flight",
    peers=("independent", "pipelining", "in_turn"),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(
        at_most(1.25, "independent", what="step", stages=2, layers=12, batch=32, chunks=8),
        at_most(1.05, "pipelining", what="step", stages=2, layers=12, batch=32, chunks=8),
        at_most(1.8, "schedule", what="idle", stages=2, layers=12, batch=32, chunks=8),
        at_most(1 / 1.4, "in_turn", what="two threads", stages=2, layers=12, batch=32, chunks=8),
    ),
    repeats=5,
)
