"""A Llama that is cut over CPU ranks by the plan that it brings: a forward with its backward, and 16 new tokens.

`plain` is the model alone, whose operations may use all cores. `transformers` is the same plan as transformers runs it:
a process per rank over gloo, with as many threads as a rank of ours has. Needs the extra `transformers`.
"""

import argparse
import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mgpu_core import TensorParallel
from mgpu_core.tools.bench.case import Case, Contest, RowPlan, at_most
from mgpu_core.tools.bench.gloo import GlooTeam
from mgpu_core.tools.bench.llama import LlamaTask, OwnPart, saved
from mgpu_core.tools.bench.options import add_counts
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Return the model, the batch and the ranks."""
    add_counts(parser, layers=(8, "blocks of the model"), width=(512, "of the model"))
    add_counts(parser, batch=(8, "rows of 64 tokens"), ranks=(2, "how many CPU ranks"))


def plan(options: argparse.Namespace) -> RowPlan:
    """Return a row of a step, and one of new tokens."""
    same = {name: getattr(options, name) for name in ("ranks", "layers", "width", "batch")}
    rows = [{"what": what} | same for what in ("step", "generate")]
    return RowPlan(rows, _contests(rows, options))


def _contests(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Generator[Contest]:
    for row in rows:
        task = LlamaTask(options.layers, options.width, options.batch, row["what"])
        with contextlib.ExitStack() as stack:
            sides = _contestants(task, options.ranks, options.peers, stack)
            yield Contest(row, sides, Timing(options.repeats, 2))


def _contestants(
    task: LlamaTask, ranks: int, peers: Sequence[str], stack: contextlib.ExitStack
) -> Mapping[str, Contestant]:
    salts = itertools.count(1)
    tp = TensorParallel(task.network(), ["cpu"] * ranks)
    sides = {OURS: _in_process(task, tp, partial(tp.call, "generate"), salts)}
    if "plain" in peers:
        net = task.network()
        sides["plain"] = _in_process(task, net, net.generate, salts)
    if "transformers" in peers:
        team = stack.enter_context(GlooTeam(ranks, OwnPart))
        team.prepare(task, saved(task).name)
        sides["transformers"] = Contestant(team.run, lambda: team.wrong(next(salts)))
    return sides


def _in_process(task: LlamaTask, net: object, generate: object, salts: Iterator[int]) -> Contestant:
    tokens = task.tokens(0)

    def wrong() -> int:
        salt = next(salts)
        return task.wrong(task.compute(net, generate, task.tokens(salt)), salt)

    return Contestant(timed(lambda: task.compute(net, generate, tokens)), wrong)


CASE = Case(
    name="tensor_parallel",
    summary="TensorParallel: a Llama cut over CPU ranks by its plan",
    peers=("plain", "transformers"),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(
        at_most(1.0, "transformers", what="step", ranks=2, layers=8, width=512, batch=8),
        at_most(1.0, "transformers", what="generate", ranks=2, layers=8, width=512, batch=8),
    ),
    repeats=5,
)
