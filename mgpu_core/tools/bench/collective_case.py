"""Shared by all collectives: options, rows, and contestants.

The columns are those of nccl-tests. Its `size` is of one rank's tensor (all_reduce, broadcast, reduce), or of
the root's or a rank's data of all ranks together (the others); `count` is the elements of one rank's part.

`--peers touch` adds the roof of those in place: every tensor read and written once, by torch, without any sum. Who is
as fast has nothing left to win from this memory.
"""

import argparse
import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from mgpu_core.comm.reductions import BETWEEN_GPUS
from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, UsageError, chosen, refuse
from mgpu_core.tools.bench.collective import (
    DTYPES,
    MOST_RANKS,
    Holding,
    TeamCase,
    TeamTask,
    Tensors,
    Wanted,
    around,
    others,
)
from mgpu_core.tools.bench.gloo import GlooTeam
from mgpu_core.tools.bench.options import add_ranks, names_among, parse_sizes
from mgpu_core.tools.bench.timing import OURS, CacheFlush, Contestant, Timing, nothing, timed

TOUCH = "touch"

Way = Callable[[TeamTask, Sequence[torch.Tensor]], Tensors]


def case_of(collective: TeamCase) -> Case:
    """Return the case of one collective."""
    factor = "2(n-1)/n" if collective.bus_factor is around else "(n-1)/n" if collective.bus_factor is others else "1"
    formula = f"algbw = size / median time, busbw = algbw x {factor} with n ranks; GB/s, 1 GB = 10^9 bytes"
    return Case(
        name=collective.name,
        summary=collective.summary,
        peers=("gloo", "torch"),
        more_peers=(TOUCH,) if collective.position == "in" else (),
        plan=partial(plan, collective),
        add_arguments=partial(_add_arguments, collective),
        unit="us",
        formula=formula,
        bounds=collective.bounds,
        repeats=collective.repeats,
    )


def plan(collective: TeamCase, options: argparse.Namespace) -> RowPlan:
    """Return a row per number of ranks and size. `UsageError` for numbers that no row can have."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    for algorithm in BETWEEN_GPUS:
        if options.device == "cpu" and algorithm in getattr(options, "algorithms", []):
            raise UsageError(f"--algorithms {algorithm}: it needs GPUs (--device cuda)")
    tasks = {ranks: [_task(collective, options, ranks, size) for size in options.sizes] for ranks in options.ranks}
    refuse(options, "gloo", gloo_cannot(next(iter(tasks.values()))[0]))
    labels = [_labels(collective, task) for sizes in tasks.values() for task in sizes]
    return RowPlan(labels, _contests(collective, options, tasks))


def gloo_cannot(task: TeamTask) -> str:
    """Return what gloo lacks for a task; empty: it can do it."""
    if task.devices:
        return "it is measured on the CPU only"
    is_whole = not getattr(torch, task.dtype).is_floating_point
    return f"it has no average of {task.dtype}" if task.op == "avg" and is_whole else ""


def _contests(
    collective: TeamCase, options: argparse.Namespace, tasks: Mapping[int, Sequence[TeamTask]]
) -> Generator[Contest]:
    schedule = Timing(options.repeats, warmup=2, flush=CacheFlush() if options.device == "cpu" else nothing)
    for ranks, sizes in tasks.items():
        with contextlib.ExitStack() as stack:
            takes_part = "gloo" in options.peers and not gloo_cannot(sizes[0])
            team = stack.enter_context(GlooTeam(ranks)) if takes_part else None
            for task in sizes:
                yield _contest(collective, options, task, team, schedule)


def _contest(
    collective: TeamCase, options: argparse.Namespace, task: TeamTask, team: GlooTeam | None, schedule: Timing
) -> Contest:
    """In a function of its own: the tensors of one row are gone before the next one's are made."""
    peers = [peer for peer in options.peers if peer != "gloo" or team is not None]
    without = {"gloo": gloo_cannot(task)} if len(peers) < len(options.peers) else {}
    others = getattr(options, "algorithms", [])[1:]
    sides = chosen(_contestants(collective, task, others, team), [*map(_name_of, others), *peers])
    labels, factor = _labels(collective, task), collective.bus_factor(task.ranks)
    return Contest(labels, sides, schedule, int(labels["size"]), factor, without)


def _name_of(algorithm: str) -> str:
    """Return the name of a contestant that is ours, too."""
    return f"{OURS} {algorithm}"


def _add_arguments(collective: TeamCase, parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_ranks(parser, "2,4,8")
    add("--sizes", type=parse_sizes, default="64M", metavar="LIST", help="such as 64M or 1K:256M (default: 64M)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    if collective.ops:
        add("--op", choices=collective.ops, default=collective.ops[0], help="default: %(default)s")
    if collective.algorithms:
        known = names_among(collective.algorithms)
        text = f"of ours: {', '.join(collective.algorithms)} (default: %(default)s)"
        add("--algorithms", type=known, default="auto", metavar="LIST", help=text)


def _task(collective: TeamCase, options: argparse.Namespace, ranks: int, size: int) -> TeamTask:
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(f"--ranks: wanted 2 to {MOST_RANKS}, got {ranks}")
    count = size // _itemsize(options.dtype) // (ranks if collective.split else 1)
    if count == 0:
        raise UsageError(f"--sizes: {size} bytes are less than one {options.dtype} for each of {ranks} ranks")
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(ranks)) if gpus else ()
    algorithm = getattr(options, "algorithms", ["auto"])[0]
    return TeamTask(ranks, count, options.dtype, getattr(options, "op", "sum"), algorithm, devices)


def _itemsize(dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize


def _labels(collective: TeamCase, task: TeamTask) -> dict[str, Label]:
    nbytes = task.count * _itemsize(task.dtype) * (task.ranks if collective.split else 1)
    # Reductions are told apart by `op`; `reduce` has one, which is not an option.
    redop = task.op if collective.ops or collective.name == "reduce" else "none"
    labels: dict[str, Label] = {"device": task.device(0).partition(":")[0], "ranks": task.ranks, "size": nbytes}
    labels |= {"count": task.count, "type": task.dtype, "redop": redop, "position": collective.position}
    return labels | ({"algorithm": task.algorithm} if collective.algorithms else {})


def _contestants(
    collective: TeamCase, task: TeamTask, others: Sequence[str], team: GlooTeam | None
) -> Mapping[str, Contestant]:
    # Ours and the torch loop take turns on the same tensors: each begins with fresh inputs and a flushed cache.
    holding, tiny = (Holding(collective, each, range(task.ranks)) for each in (task, task.tiny()))
    salts = itertools.count(1)

    def wait() -> None:
        for device in dict.fromkeys(task.devices):
            torch.accelerator.synchronize(torch.device(device))

    def here(do: Way, algorithm: str = task.algorithm, wanted: Wanted | None = None) -> Contestant:
        chosen, small = (replace(each, algorithm=algorithm) for each in (task, tiny.task))
        run = timed(lambda: do(chosen, holding.sends), wait, wake=lambda: do(small, tiny.sends))
        return Contestant(
            run, lambda: holding.wrong(lambda: do(chosen, holding.sends), next(salts), wanted), holding.reset
        )

    sides = {OURS: here(collective.ours), "torch": here(collective.loop)}
    sides |= {_name_of(algorithm): here(collective.ours, algorithm) for algorithm in others}
    if collective.position == "in":
        sides[TOUCH] = here(_touch, wanted=lambda values, rank: -collective.sends(values, rank))
    if team is not None:
        team.prepare(collective.name, task)
        sides["gloo"] = Contestant(team.run, lambda: team.wrong(next(salts)), team.reset)
    return sides


def _touch(_task: TeamTask, sends: Sequence[torch.Tensor]) -> Tensors:
    return [send.neg_() for send in sends]
