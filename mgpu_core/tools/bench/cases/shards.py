"""A training step of equal blocks whose parameters are in shards over ranks, by plain SGD.

Ours is `TrainStep` with `shard="parameters"`. `copies` is the same step with all parameters on each device. `fsdp2` is
`torch.distributed.fsdp.fully_shard` on each block and on the network: a process per rank, over gloo, or over NCCL where
each rank has a GPU. CPU ranks are one device, whose part is everything: blocks come and go as on many devices, and no
memory is saved.
"""

import argparse
import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from mgpu_core import TrainStep, optim
from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, UsageError, at_most, refuse
from mgpu_core.tools.bench.fsdp import LR, FsdpRank, ShardsTask
from mgpu_core.tools.bench.gloo import GlooTeam
from mgpu_core.tools.bench.options import RANKS_TEXT, add_counts, parse_counts
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Network, rows, ranks and device."""
    add_counts(parser, layers=(8, "blocks"), width=(512, "of a block"), ranks=(2, RANKS_TEXT))
    text = "rows over all ranks (default: %(default)s)"
    parser.add_argument("--batch", type=parse_counts, default="64,512", metavar="LIST", help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")


def plan(options: argparse.Namespace) -> RowPlan:
    """Return a row per batch. `UsageError` for settings that no row can have."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    for rows in options.batch:
        if rows % options.ranks:
            raise UsageError(f"--batch {rows}: FSDP2 needs equal shares, and {options.ranks} ranks have none of these")
    lacks = options.device == "cuda" and torch.cuda.device_count() < options.ranks
    without = {"fsdp2": "NCCL needs a GPU for each rank"} if lacks and "fsdp2" in options.peers else {}
    refuse(options, "fsdp2", without.get("fsdp2", ""))
    tasks = [ShardsTask(options.device, options.ranks, options.layers, options.width, rows) for rows in options.batch]
    return RowPlan(list(map(vars, tasks)), _contests(tasks, options, without))


def _contests(tasks: Sequence[ShardsTask], options: argparse.Namespace, without: dict[str, str]) -> Generator[Contest]:
    peers = [peer for peer in options.peers if peer not in without]
    for task in tasks:
        with contextlib.ExitStack() as stack:
            sides = _contestants(task, peers, stack)
            yield Contest(vars(task), sides, Timing(options.repeats, 2), without=without)


def _contestants(task: ShardsTask, peers: Sequence[str], stack: contextlib.ExitStack) -> Mapping[str, Contestant]:
    salts = itertools.count(1)
    sides = {OURS: _in_process(task, "parameters", stack, salts)}
    if "copies" in peers:
        sides["copies"] = _in_process(task, None, stack, salts)
    if "fsdp2" in peers:
        team = stack.enter_context(GlooTeam(task.ranks, FsdpRank))
        team.prepare(task)
        sides["fsdp2"] = Contestant(team.run, lambda: team.wrong(next(salts)))
    return sides


def _in_process(task: ShardsTask, shard: str | None, stack: contextlib.ExitStack, salts: Iterator[int]) -> Contestant:
    step, rows = stack.enter_context(contextlib.closing(_made(task, shard))), task.rows(0)

    def wrong() -> int:
        salt = next(salts)
        with contextlib.closing(_made(task, shard)) as fresh:
            fresh(*task.rows(salt))
            with fresh.full_parameters() as network:
                return task.wrong(network.parameters(), salt)

    return Contestant(timed(lambda: step(*rows), task.wait), wrong)


def _made(task: ShardsTask, shard: str | None) -> TrainStep:
    # More ranks than GPUs share them.
    devices = ["cpu" if task.device == "cpu" else rank % torch.cuda.device_count() for rank in range(task.ranks)]
    network = task.network()
    optimizer = optim.SGD(network.parameters(), lr=LR)
    return TrainStep(network, functional.cross_entropy, optimizer, devices, shard=shard, workers="threads")


_SAME: dict[str, Label] = {"device": "cpu", "ranks": 2, "layers": 8, "width": 512}

CASE = Case(
    name="shards",
    summary='TrainStep with shard="parameters": each device keeps a part of each block',
    peers=("copies", "fsdp2"),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(
        at_most(0.6, "fsdp2", **_SAME, batch=64),
        at_most(1.4, "copies", **_SAME, batch=64),
        at_most(1.2, "copies", **_SAME, batch=512),
    ),
    repeats=7,
)
