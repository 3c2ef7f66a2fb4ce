"""An epoch of SimpleNet steps on two ranks: batches from our loaders against those of a plain `DataLoader`.

`dataloader`: the same loader of tensors, with and without `DeviceLoader` around it. On the CPU there is nothing to
copy, and the row has its cost; on GPUs the copies of a batch run while the batch before is computed with.
`memory`: images in memory, from `TensorLoader`, against a `DataLoader` that picks them one by one.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from mgpu_core import DeviceLoader, TensorLoader, TrainStep, optim
from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, UsageError, at_least, at_most, chosen
from mgpu_core.tools.bench.options import parse_count
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing
from mgpu_core.tools.mnist.model import CLASSES, build_model

BATCH = 256
RANKS = 2

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Images and device."""
    add = parser.add_argument
    add("--images", type=parse_count, default=16384, metavar="N", help="of an epoch (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")


def plan(options: argparse.Namespace) -> RowPlan:
    """Return a row per kind of data."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    same: dict[str, Label] = {"device": options.device, "ranks": RANKS, "batch": BATCH, "images": options.images}
    rows: list[dict[str, Label]] = [{"data": name, **same} for name in ("dataloader", "memory")]
    return RowPlan(rows, _contests(rows, options))


def _contests(rows: Sequence[dict[str, Label]], options: argparse.Namespace) -> Generator[Contest]:
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    devices: list[int | str] = [rank % gpus for rank in range(RANKS)] if gpus else ["cpu"] * RANKS
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (options.images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (options.images,), generator=generator)
    floats = images.float() / 255
    plain = DataLoader(TensorDataset(floats, labels), BATCH, pin_memory=gpus > 0)
    bytewise = DataLoader(_Bytes(images, labels), BATCH, pin_memory=gpus > 0)
    pairs: dict[str, tuple[Batches, Batches]] = {
        "dataloader": (DeviceLoader(plain, devices), plain),
        "memory": (DeviceLoader(TensorLoader(images, labels, batch_size=BATCH), devices), bytewise),
    }
    for row in rows:
        ours, theirs = pairs[str(row["data"])]
        with contextlib.ExitStack() as stack:
            net = build_model("simplenet").to(devices[0] if gpus else "cpu")
            optimizer = optim.SGD(net.parameters(), lr=1e-5)
            step = stack.enter_context(contextlib.closing(TrainStep(net, functional.cross_entropy, optimizer, devices)))
            sides = {
                OURS: _contestant(ours, step, floats, labels),
                "plain": _contestant(theirs, step, floats, labels),
            }
            yield Contest(row, chosen(sides, options.peers), Timing(options.repeats, warmup=1))


class _Bytes(TensorDataset):
    """Images of bytes, converted one by one."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        images, labels = self.tensors
        return images[index].float() / 255, labels[index]


def _contestant(
    batches: Batches, step: Callable[..., torch.Tensor], images: torch.Tensor, labels: torch.Tensor
) -> Contestant:
    def run() -> float:
        begin = time.perf_counter()
        for x, y in batches:
            loss = step(x, y)
        loss.item()
        return time.perf_counter() - begin

    def wrong() -> int:
        pairs = [(x.cpu(), y.cpu()) for x, y in batches]
        seen = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        return int((~torch.isclose(seen[0], images, atol=1e-6)).sum() + (seen[1] != labels).sum())

    return Contestant(run, wrong)


CASE = Case(
    name="loader",
    summary="mgpu_core.DeviceLoader and TensorLoader: an epoch of TrainStep, against a plain DataLoader",
    peers=("plain",),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(
        at_most(1.05, "plain", data="dataloader", device="cpu", images=16384),
        at_least(2, "plain", data="memory", device="cpu", images=16384),
    ),
    repeats=7,
)
