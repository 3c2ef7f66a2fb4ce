"""One whole training step: clear the gradients, forward, cross-entropy, backward, all-reduce, update by SGD.

Ours is `mgpu_core.TrainStep`, on the CPU with `workers="threads"` for the CNN, on GPUs captured as graphs, as
`compile` is (`torch.compile` with `reduce-overhead`). On the CPU the bare module has every core inside each operation;
`ddp` is today's usual choice, a process per rank, so it has no row of one rank. A step of SimpleNet takes less than
a millisecond, so a turn is several steps in a row, as many for everybody, and the table has the time of one.
"""

import argparse
import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from mgpu_core import TrainStep, optim
from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, UsageError, at_most, chosen, refuse
from mgpu_core.tools.bench.ddp_worker import DdpRank
from mgpu_core.tools.bench.gloo import GlooTeam
from mgpu_core.tools.bench.options import RANKS_TEXT, names_among, parse_count, parse_counts
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, nothing, timed
from mgpu_core.tools.bench.training import MakeStep, Step, Trainee, TrainRow, torch_step

BATCH = {"simplenet": 64, "cnn": 256}
RANKS = {"simplenet": [1, 2], "cnn": [2, 4]}
"""Without `--batch` and `--ranks`: the rows that the bounds are about."""
STEPS = {"simplenet": 20, "cnn": 1}
"""How many steps a turn has."""
WARMUP = {"simplenet": 2, "cnn": 8}
"""Turns that are not kept: on a GPU, the first steps are recorded."""
WORKERS = {"simplenet": "auto", "cnn": "threads"}
"""How ours runs its ranks on the CPU: the operations of the CNN are long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, ranks, batch and device."""
    add, models = parser.add_argument, tuple(STEPS)
    add("--model", type=names_among(models), default=",".join(models), metavar="LIST", help="default: %(default)s")
    add("--ranks", type=parse_counts, metavar="LIST", help=f"{RANKS_TEXT} (default: 1,2 for simplenet, 2,4 for cnn)")
    add("--batch", type=parse_count, metavar="N", help="rows over all ranks (default: 64 for simplenet, 256 for cnn)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")


def plan(options: argparse.Namespace) -> RowPlan:
    """Return a row per model and number of ranks. `UsageError` for settings that no row can have."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    for peer, what in {"torch": "torch.nn.DataParallel", "compile": "torch.compile's graphs"}.items():
        if options.device == "cpu" and peer in options.peers:
            raise UsageError(f"--peers {peer}: {what} need{'s' if peer == 'torch' else ''} a GPU (--device cuda)")
    trainings = [training for model in options.model for training in _trainings(model, options)]
    for training in trainings:
        refuse(options, "ddp", _ddp_cannot(training))
    return RowPlan(list(map(_labels, trainings)), _contests(trainings, options))


def _trainings(model: str, options: argparse.Namespace) -> list[TrainRow]:
    batch, counts = options.batch or BATCH[model], options.ranks or RANKS[model]
    return [TrainRow(model, batch, ranks, STEPS[model], options.device) for ranks in counts]


def _contests(trainings: Sequence[TrainRow], options: argparse.Namespace) -> Generator[Contest]:
    for training in trainings:
        reason = _ddp_cannot(training)
        peers = [peer for peer in options.peers if peer != "ddp" or (training.ranks > 1 and not reason)]
        without = {"ddp": reason} if reason and "ddp" in options.peers else {}
        with contextlib.ExitStack() as stack:
            sides = chosen(_contestants(training, peers, stack), peers)
            schedule = Timing(options.repeats, WARMUP[training.model])
            yield Contest(_labels(training), sides, schedule, without=without)


def _ddp_cannot(training: TrainRow) -> str:
    """Return why DDP is in no row of this training; empty: it can be."""
    if training.device != "cpu":
        return "it runs over gloo, on the CPU only"
    uneven = training.batch % training.ranks
    return f"it needs equal shares, but {training.batch} rows are not for {training.ranks} ranks" if uneven else ""


def _labels(training: TrainRow) -> dict[str, Label]:
    return {name: getattr(training, name) for name in ("model", "device", "ranks", "batch")}


def _contestants(training: TrainRow, peers: Sequence[str], stack: contextlib.ExitStack) -> Mapping[str, Contestant]:
    """Return the contestants of one row; `stack` ends the threads and processes that they have."""
    salts = itertools.count(1)
    # More ranks than GPUs share them.
    gpus = [rank % torch.cuda.device_count() for rank in range(training.ranks)] if training.device == "cuda" else []
    devices: Sequence[int | str] = gpus or ["cpu"] * training.ranks

    def ours(network: nn.Module, optimizer: SGD) -> Step:
        workers = "auto" if gpus else WORKERS[training.model]
        step = TrainStep(network, functional.cross_entropy, optimizer, devices, capture=bool(gpus), workers=workers)
        return stack.enter_context(contextlib.closing(step))

    ways: dict[str, MakeStep] = {OURS: ours, "bare": torch_step}
    if "torch" in peers:
        ways["torch"] = lambda network, optimizer: torch_step(nn.DataParallel(network, gpus), optimizer)
    if "compile" in peers:
        ways["compile"] = lambda network, optimizer: torch_step(
            cast(nn.Module, torch.compile(network, mode="reduce-overhead")), optimizer
        )
    sides = {
        who: _contestant(training, Trainee(training, way, sgd=optim.SGD if who == OURS else SGD), salts)
        for who, way in ways.items()
    }
    if "ddp" in peers:
        team = stack.enter_context(GlooTeam(training.ranks, DdpRank))
        team.prepare(training)
        sides["ddp"] = Contestant(_per_step(training, team.run), lambda: team.wrong(next(salts)))
    return sides


def _contestant(training: TrainRow, trainee: Trainee, salts: "itertools.count[int]") -> Contestant:
    wait = torch.cuda.synchronize if training.device == "cuda" else nothing
    return Contestant(_per_step(training, timed(trainee.train, wait)), lambda: trainee.wrong(next(salts)))


def _per_step(training: TrainRow, run: Callable[[], float]) -> Callable[[], float]:
    """From the seconds of a turn to those of a step."""
    return lambda: run() / training.steps


CASE = Case(
    name="train_step",
    summary="mgpu_core.TrainStep: forward, loss, backward and SGD of the MNIST models",
    peers=("bare", "ddp"),
    more_peers=("torch", "compile"),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(
        at_most(1.2, "bare", model="simplenet", device="cpu", ranks=1, batch=64),
        at_most(2.0, "bare", model="simplenet", device="cpu", ranks=2, batch=64),
        at_most(0.40, "ddp", model="simplenet", device="cpu", ranks=2, batch=64),
        at_most(0.80, "bare", model="cnn", device="cpu", ranks=2, batch=256),
        at_most(0.95, "ddp", model="cnn", device="cpu", ranks=2, batch=256),
        at_most(0.85, "bare", model="cnn", device="cpu", ranks=4, batch=256),
        at_most(0.20, "bare", model="simplenet", device="cuda", ranks=1, batch=64),
        at_most(1.0, "compile", model="simplenet", device="cuda", ranks=1, batch=64),
        at_most(1 / 3, "torch", model="simplenet", device="cuda", ranks=2, batch=64),
    ),
    repeats=7,
)
