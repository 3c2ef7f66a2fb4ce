"""The cost of making replicas in Python, per forward, with the copies left out on both sides.

torch's `replicate` asks `_broadcast_coalesced_reshape` for the tensors, ours asks `_copy_tensors`; both are replaced
by a function that returns lists made before the clock starts. The rest is the walk over the modules, replicas and
their wiring, and their end, which a forward pays as well.
"""

import argparse
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

from mgpu_core.tools.bench.case import Case, Contest, Label, RowPlan, at_most, chosen
from mgpu_core.tools.bench.options import add_ranks, names_among
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, timed
from mgpu_core.tools.mnist.model import build_model

MODELS = ("cnn", "resnet50", "vit_b_16")
Tensors = Sequence[torch.Tensor]
Replicate = Callable[[], list[nn.Module]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Ranks and models."""
    add_ranks(parser, "2,8")
    parser.add_argument(
        "--models", type=names_among(MODELS), default=",".join(MODELS), metavar="LIST", help="default: %(default)s"
    )


def plan(options: argparse.Namespace) -> RowPlan:
    """Return a row per model and number of ranks."""
    rows: list[dict[str, Label]] = [
        {"model": model, "ranks": ranks} for model in options.models for ranks in options.ranks
    ]
    return RowPlan(rows, (_contest(row, options) for row in rows))


def _contest(row: dict[str, Label], options: argparse.Namespace) -> Contest:
    network, image = build(str(row["model"]))
    ranks = int(row["ranks"])
    sides = {OURS: _ours(network, image, ranks), "torch": _torch(network, image, ranks)}
    return Contest(row, chosen(sides, options.peers), Timing(options.repeats, warmup=3))


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network with random weights, and one image for it."""
    if name == "cnn":
        return build_model(name).eval(), torch.randn(1, 1, 28, 28)
    from torchvision import models

    return getattr(models, name)(weights=None).eval(), torch.randn(1, 3, 224, 224)


def _ours(network: nn.Module, image: torch.Tensor, ranks: int) -> Contestant:
    module = importlib.import_module("mgpu_core.parallel.replicate_modules")
    tensors = [*network.parameters(), *network.buffers()]
    copies = prepared([tensors], ranks)
    return _contestant(
        lambda: module.replicate(network, ["cpu"] * ranks),
        mock.patch.object(module, "_copy_tensors", copies),
        network,
        image,
    )


def _torch(network: nn.Module, image: torch.Tensor, ranks: int) -> Contestant:
    module = importlib.import_module("torch.nn.parallel.replicate")
    copies = prepared([list(network.parameters()), list(network.buffers())], ranks)
    replaced = mock.patch.object(module, "_broadcast_coalesced_reshape", copies)
    return _contestant(lambda: module.replicate(network, list(range(ranks))), replaced, network, image)


def prepared(groups: Sequence[Tensors], ranks: int) -> Callable[..., list[list[torch.Tensor]]]:
    """Stands in for the copies of a group of tensors to all ranks: other tensors over the same memory."""
    ready = {id(group[0]): [[each.detach() for each in group] for _ in range(ranks)] for group in groups if group}
    return lambda tensors, *_, **__: ready[id(tensors[0])] if tensors else []


def _contestant(
    replicate: Replicate, replaced: AbstractContextManager[Any], network: nn.Module, image: torch.Tensor
) -> Contestant:
    clock = timed(replicate)

    def run() -> float:
        with replaced:
            return clock()

    @torch.no_grad()
    def wrong() -> int:
        with replaced:
            replicas = replicate()
        wanted = network(image)
        return sum(int((~torch.isclose(replica(image), wanted, rtol=1e-4, atol=1e-5)).sum()) for replica in replicas)

    return Contestant(run, wrong)


CASE = Case(
    name="replicate",
    summary="Python cost of mgpu_core.replicate per forward, without the copies",
    peers=("torch",),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=tuple(at_most(0.2, "torch", model=name, ranks=8) for name in ("resnet50", "vit_b_16")),
    repeats=30,
)
