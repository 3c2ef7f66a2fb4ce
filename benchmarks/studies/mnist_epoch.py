"""One epoch of MNIST end to end: ours, the same loop over plain tensors, and the reference program's data loader.

Ours is `mgpu_core.tools.mnist.train` itself: the drop-in on one rank, batches cut by `gather_rows`. The peers train the
same network from the same weights with the same steps, so on the same order of images all must report the same losses.
Seconds are those of the steps, without reading files before and testing after.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, at_least, at_most, chosen
from mgpu_core.tools.bench.digits import SCALE, SHIFT, random_digits, torchvision_digits
from mgpu_core.tools.bench.options import parse_count
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing
from mgpu_core.tools.mnist import Config, Digits, Split, build_model
from mgpu_core.tools.mnist.digits import epoch_order
from mgpu_core.tools.mnist.train import train

LR, SEED = 0.01, 0
VERIFIED = 640
"""Images of the epoch on which the losses are compared, step by step."""

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Epoch = tuple[float, list[float]]
"""Seconds, and the loss of each step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Images and batch."""
    add = parser.add_argument
    add("--images", type=parse_count, default=60000, metavar="N", help="of an epoch (default: %(default)s)")
    add("--batch", type=parse_count, default=64, metavar="N", help="images of a step (default: %(default)s)")


def plan(options: argparse.Namespace) -> RowPlan:
    """One row."""
    row: dict[str, Label] = {"images": options.images, "batch": options.batch}
    return RowPlan([row], _contests(row, options))


def _contests(row: dict[str, Label], options: argparse.Namespace) -> Generator[Contest]:
    with tempfile.TemporaryDirectory(prefix="mgpu-digits-") as folder:
        contestants = chosen(_contestants(random_digits(options.images), Path(folder), options), options.peers)
        # What is verified has also warmed up.
        yield Contest(row, contestants, Timing(options.repeats, warmup=0))


def _contestants(digits: Digits, folder: Path, options: argparse.Namespace) -> Mapping[str, Contestant]:
    split, batch = digits.train, options.batch
    few = _first(digits, min(VERIFIED, split.count))
    order = epoch_order(few.train.count, SEED, 1)
    wanted = _reference(few.train, order, batch)
    sides = {
        OURS: _contestant(lambda: _ours(digits, batch), lambda: _ours(few, batch), wanted),
        "tensors": _contestant(
            lambda: _train(_cut(split, torch.randperm(split.count), batch)),
            lambda: _train(_cut(few.train, order, batch)),
            wanted,
        ),
    }
    if "dataloader" in options.peers:
        images = torchvision_digits(digits, folder)
        sides["dataloader"] = _contestant(
            lambda: _train(DataLoader(images, batch_size=batch, shuffle=True)),
            lambda: _train(DataLoader(Subset(images, order.tolist()), batch_size=batch)),
            wanted,
        )
    return sides


def _contestant(epoch: Callable[[], Epoch], short: Callable[[], Epoch], wanted: list[float]) -> Contestant:
    """`short` trains on the first images in the order of `wanted`."""

    def wrong() -> int:
        losses = torch.tensor(short()[1])
        return int((~torch.isclose(losses, torch.tensor(wanted), rtol=0, atol=1e-4)).sum())

    return Contestant(lambda: epoch()[0], wrong)


def _ours(digits: Digits, batch: int) -> Epoch:
    config = Config(engine="drop-in", device_ids=("cpu",), batch=batch, lr=LR, epochs=1, seed=SEED)
    (epoch,) = train(config, digits=digits).epochs
    return epoch.seconds, epoch.step_losses


def _train(batches: Batches) -> Epoch:
    """Return the loop that everybody writes, on the bare network."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        net = build_model("simplenet")
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    losses = []
    begin = time.perf_counter()
    for images, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    step_losses = torch.stack(losses).tolist()
    return time.perf_counter() - begin, step_losses


def _cut(split: Split, order: torch.Tensor, batch: int) -> Batches:
    for index in torch.split(order, batch):
        yield split.images[index].float().mul_(SCALE).add_(SHIFT), split.labels[index]


def _reference(split: Split, order: torch.Tensor, batch: int) -> list[float]:
    """Return the losses, with the arithmetic written out: grey to 0..1, minus the mean, over the deviation."""
    images = split.images.double().mul(SCALE).add(SHIFT).float()
    return _train((images[index], split.labels[index]) for index in torch.split(order, batch))[1]


def _first(digits: Digits, count: int) -> Digits:
    few = Split(digits.train.images[:count], digits.train.labels[:count])
    return Digits(few, digits.test)


CASE = Case(
    name="mnist_epoch",
    summary="an epoch of MNIST (SimpleNet, SGD) by mgpu_core.tools.mnist, the drop-in on one CPU rank",
    peers=("tensors", "dataloader"),
    plan=plan,
    add_arguments=add_arguments,
    unit="s",
    bounds=(
        at_most(1.10, "tensors", images=60000, batch=64),
        at_least(8, "dataloader", images=60000, batch=64),
    ),
    repeats=7,
)
