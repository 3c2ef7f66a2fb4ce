"""The drop-in at work: forward, loss on the gathered output, backward; against the bare module on all cores.

On the CPU the bare module has every core inside each operation, ours one rank per core or more: the comparison is of
two ways to use the same machine. The gradients must be those of the bare module.
"""

import argparse
import copy
from collections.abc import Callable, Generator, Mapping

import torch
from torch import nn
from torch.nn import functional

from benchmarks.case import Case, Row, UsageError, at_most, chosen, measure_row
from benchmarks.options import add_ranks, parse_count
from benchmarks.timing import OURS, Contestant, Schedule, nothing, timed
from mgpu_core import DataParallel
from mgpu_core.mnist.model import CLASSES, build_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Ranks, batch and device."""
    add_ranks(parser, "2")
    add = parser.add_argument
    add("--batch", type=parse_count, default=256, metavar="N", help="rows over all ranks (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")


def measure(options: argparse.Namespace) -> Generator[Row]:
    """A row per number of ranks. `UsageError` at once for GPUs that are not there."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    if options.device == "cpu" and "torch" in options.peers:
        raise UsageError("--peers torch: torch.nn.DataParallel needs a GPU (--device cuda)")
    return _rows(options)


def _rows(options: argparse.Namespace) -> Generator[Row]:
    images = torch.randn(options.batch, 1, 28, 28, device=options.device)
    labels = torch.randint(CLASSES, (options.batch,), device=options.device)
    network = build_model("cnn").to(options.device)
    wait = torch.cuda.synchronize if options.device == "cuda" else nothing
    for ranks in options.ranks:
        models = _models(network, options.device, ranks, options.peers)
        wanted = _gradients(models["bare"], images, labels)
        sides = {who: _contestant(model, images, labels, wanted, wait) for who, model in models.items()}
        row = {"model": "cnn", "device": options.device, "ranks": ranks, "batch": options.batch}
        yield measure_row(row, chosen(sides, options.peers), Schedule(options.repeats, warmup=2))


def _models(network: nn.Module, device: str, ranks: int, peers: list[str]) -> Mapping[str, nn.Module]:
    """Each contestant's own twin of the network. More ranks than GPUs share them."""
    gpus = [rank % torch.cuda.device_count() for rank in range(ranks)] if device == "cuda" else []
    models: dict[str, nn.Module] = {
        OURS: DataParallel(copy.deepcopy(network), gpus or ["cpu"] * ranks),
        "bare": copy.deepcopy(network),
    }
    if "torch" in peers:
        models["torch"] = nn.DataParallel(copy.deepcopy(network), gpus)
    return models


def _step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    functional.cross_entropy(model(images), labels).backward()


def _gradients(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    _step(model, images, labels)
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]


def _contestant(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    wanted: list[torch.Tensor],
    wait: Callable[[], object],
) -> Contestant:
    def wrong() -> int:
        pairs = zip(_gradients(model, images, labels), wanted, strict=True)
        return sum(int((~torch.isclose(got, want, rtol=1e-3, atol=1e-5)).sum()) for got, want in pairs)

    return Contestant(timed(lambda: _step(model, images, labels), wait), wrong, model.zero_grad)


CASE = Case(
    name="forward_backward",
    summary="mgpu_core.DataParallel: forward, cross-entropy and backward of the MNIST CNN",
    peers=("bare",),
    more_peers=("torch",),
    measure=measure,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(at_most(0.90, "bare", model="cnn", device="cpu", ranks=2, batch=256),),
)
