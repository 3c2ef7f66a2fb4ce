"""Cutting a batch by index from a tensor of bytes, normalised: our kernel against indexing and against a data loader.

Each run has a new random index and a flushed cache, as in an epoch: no row is in the cache because the last run read
it. The data loader's way is the work of one of its workers for a batch, image by image, without any process around it.
"""

import argparse
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import torch
from torch.utils.data import default_collate

from mgpu_core.kernels import gather_rows
from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, chosen
from mgpu_core.tools.bench.digits import SCALE, SHIFT, random_digits, torchvision_digits
from mgpu_core.tools.bench.options import parse_count, parse_counts
from mgpu_core.tools.bench.timing import OURS, CacheFlush, Contestant, Timing, timed
from mgpu_core.tools.mnist import Digits

PIXELS = 28 * 28
NBYTES_OF_ROW = 8 + PIXELS * (1 + 4)
"""One int64 of the index, a row of uint8 read, a row of float32 written."""

Cut = Callable[[torch.Tensor], torch.Tensor]
"""An index (batch,) to normalised images (batch, 1, 28, 28)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Batches and images."""
    add = parser.add_argument
    add("--batches", type=parse_counts, default="64,256,1024", metavar="LIST", help="rows (default: %(default)s)")
    add("--images", type=parse_count, default=60000, metavar="N", help="rows in all (default: %(default)s)")


def plan(options: argparse.Namespace) -> RowPlan:
    """Return a row per batch."""
    rows: list[dict[str, Label]] = [{"images": options.images, "batch": batch} for batch in options.batches]
    return RowPlan(rows, _contests(rows, options))


def _contests(rows: Sequence[dict[str, Label]], options: argparse.Namespace) -> Generator[Contest]:
    schedule = Timing(options.repeats, warmup=3, flush=CacheFlush())
    with tempfile.TemporaryDirectory(prefix="mgpu-digits-") as folder:
        cuts = _cuts(random_digits(options.images), Path(folder), options)
        for row in rows:
            batch = int(row["batch"])
            sides = {who: _contestant(cut, cuts, options.images, batch) for who, cut in cuts.items()}
            yield Contest(row, chosen(sides, options.peers), schedule, batch * NBYTES_OF_ROW)


def _cuts(digits: Digits, folder: Path, options: argparse.Namespace) -> Mapping[str, Cut]:
    rows = digits.train.images
    cuts = {
        OURS: lambda index: gather_rows(rows, index, scale=SCALE, shift=SHIFT),
        "tensors": lambda index: rows[index].float().mul_(SCALE).add_(SHIFT),
    }
    if "dataloader" in options.peers:
        images = torchvision_digits(digits, folder)
        cuts["dataloader"] = lambda index: default_collate([images[i] for i in index.tolist()])[0]
    return cuts


def _contestant(cut: Cut, cuts: Mapping[str, Cut], images: int, batch: int) -> Contestant:
    index = torch.empty(batch, dtype=torch.int64)

    def wrong() -> int:
        index.random_(images)
        wanted = cuts["tensors"](index)
        return int((~torch.isclose(cut(index), wanted, rtol=1e-6, atol=1e-6)).sum())

    run = timed(lambda: cut(index), wake=lambda: cut(index[:1]))
    return Contestant(run, wrong, lambda: index.random_(images))


CASE = Case(
    name="gather_rows",
    summary="mgpu_core.kernels.gather_rows: uint8 rows to a normalised float32 batch, by index",
    peers=("tensors",),
    more_peers=("dataloader",),
    plan=plan,
    add_arguments=add_arguments,
    unit="us",
    formula="GB/s = batch x (8 bytes of index + 784 read + 3136 written) / median time, 1 GB = 10^9 bytes",
    repeats=100,
)
