"""The drop-in at work: forward, loss on the gathered output, backward; against the bare module on all cores.

On the CPU the bare module has every core inside each operation, ours one rank per core or more: the comparison is of
two ways to use the same machine. A step of SimpleNet takes less than a millisecond, so a turn is several steps in a
row, and `workers="auto"` chooses how its ranks run. The gradients must be those of the bare module.
"""

import argparse
import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from mgpu_core import DataParallel
from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, UsageError, at_most, chosen
from mgpu_core.tools.bench.options import add_ranks, names_among, parse_count
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, nothing, timed
from mgpu_core.tools.mnist.model import CLASSES, build_model

BATCH = {"simplenet": 64, "cnn": 256}
"""Without `--batch`: the rows that the bounds are about."""
STEPS = {"simplenet": 20, "cnn": 1}
"""How many steps a turn has."""
WORKERS = {"simplenet": "auto", "cnn": "threads"}
"""How ours runs its ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, ranks, batch and device."""
    add_ranks(parser, "2")
    add, models = parser.add_argument, tuple(STEPS)
    add("--model", type=names_among(models), default=",".join(models), metavar="LIST", help="default: %(default)s")
    add("--batch", type=parse_count, metavar="N", help="rows over all ranks (default: 64 for simplenet, 256 for cnn)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")


def plan(options: argparse.Namespace) -> RowPlan:
    """Return a row per model and number of ranks. `UsageError` for GPUs that are not there."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    if options.device == "cpu" and "torch" in options.peers:
        raise UsageError("--peers torch: torch.nn.DataParallel needs a GPU (--device cuda)")
    rows: list[dict[str, Label]] = [
        {
            "model": model,
            "workers": WORKERS[model],
            "device": options.device,
            "ranks": ranks,
            "batch": options.batch or BATCH[model],
        }
        for model, ranks in itertools.product(options.model, options.ranks)
    ]
    return RowPlan(rows, (_contest(row, options) for row in rows))


@dataclass(frozen=True)
class NetTask:
    """The work of one turn, the same for every contestant: steps of a model on a batch."""

    model: str
    device: str
    images: torch.Tensor
    labels: torch.Tensor

    def turn(self, module: nn.Module) -> None:
        """Return the steps, each with the gradients cleared."""
        for _ in range(STEPS[self.model]):
            self.gradients(module)

    def gradients(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the gradients of one step."""
        module.zero_grad()
        functional.cross_entropy(module(self.images), self.labels).backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in module.parameters()]


def _contest(row: dict[str, Label], options: argparse.Namespace) -> Contest:
    model, ranks, batch = str(row["model"]), int(row["ranks"]), int(row["batch"])
    images = torch.randn(batch, 1, 28, 28, device=options.device)
    labels = torch.randint(CLASSES, (batch,), device=options.device)
    task = NetTask(model, options.device, images, labels)
    modules = _modules(model, options.device, ranks, options.peers)
    wanted = task.gradients(modules["bare"])
    sides = {who: _contestant(task, module, wanted) for who, module in modules.items()}
    return Contest(row, chosen(sides, options.peers), Timing(options.repeats, warmup=2))


def _modules(model: str, device: str, ranks: int, peers: list[str]) -> Mapping[str, nn.Module]:
    """Each contestant's own copy of the network. More ranks than GPUs share them."""
    network = build_model(model).to(device)
    gpus = [rank % torch.cuda.device_count() for rank in range(ranks)] if device == "cuda" else []
    modules: dict[str, nn.Module] = {
        OURS: DataParallel(copy.deepcopy(network), gpus or ["cpu"] * ranks, workers=WORKERS[model]),
        "bare": copy.deepcopy(network),
    }
    if "torch" in peers:
        modules["torch"] = nn.DataParallel(copy.deepcopy(network), gpus)
    return modules


def _contestant(task: NetTask, module: nn.Module, wanted: list[torch.Tensor]) -> Contestant:
    def wrong() -> int:
        pairs = zip(task.gradients(module), wanted, strict=True)
        return sum(int((~torch.isclose(got, want, rtol=1e-3, atol=1e-5)).sum()) for got, want in pairs)

    seconds = timed(lambda: task.turn(module), torch.cuda.synchronize if task.device == "cuda" else nothing)
    return Contestant(lambda: seconds() / STEPS[task.model], wrong)


CASE = Case(
    name="forward_backward",
    summary="mgpu_core.DataParallel: forward, cross-entropy and backward of the MNIST models",
    peers=("bare",),
    more_peers=("torch",),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(
        at_most(2.5, "bare", model="simplenet", workers="auto", device="cpu", ranks=2, batch=64),
        at_most(0.90, "bare", model="cnn", device="cpu", ranks=2, batch=256),
    ),
)
