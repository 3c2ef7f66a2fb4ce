"""Parameters in shards on one GPU, which keeps all parts: blocks come and go, and the numbers are those of copies."""

import pytest
import torch
from fakes.here import OPTIMIZERS, alike, optimizer_of
from torch import nn
from torch.nn import functional

import mgpu_core


def blocks(here, layers, width, dtype):
    torch.manual_seed(0)
    members = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(20, width), *members, nn.Linear(width, 3)).to(here.device, dtype)


def trained(here, shard, name, *, layers=6, width=96, dtype=torch.float64):
    """Return a step of two ranks that share the device, after three calls; each block is a bucket."""
    net = blocks(here, layers, width, dtype)
    optimizer = optimizer_of(name, net.parameters())
    step = mgpu_core.TrainStep(net, functional.cross_entropy, optimizer, here.team(2), shard=shard, bucket_nbytes=1)
    for x, y in here.batches(3, dtype=dtype):
        step(x, y)
        here.poison()
    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_are_those_of_copies(here, name):
    with here.late():
        shards, copies = (trained(here, shard, name) for shard in ("parameters", None))
        with shards.full_parameters() as net:
            alike(net, copies.module, 1e-9)


def test_memory_beside_copies(here):
    """Of sixteen blocks of 4 MiB on a GPU; elsewhere it is not counted."""
    for shard in ("parameters", None):
        step = trained(here, shard, "adamw", layers=16, width=1024 if here.is_gpu else 16, dtype=torch.float32)
        ((x, y),) = here.batches(1, dtype=torch.float32)
        if here.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        step(x, y)
        if here.is_gpu:
            most = torch.cuda.max_memory_allocated() >> 20
            here.figures[f"MiB of a step of two ranks, {'in shards' if shard else 'with copies'}"] = most
        step.close()
