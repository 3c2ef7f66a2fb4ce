"""Many steps of a TrainStep over SimpleNet, run by test_soak_steps.py in a process of its own.

Prints one JSON line per checkpoint: what the process holds then, with the garbage collector off.

    python -P long_steps.py RANKS STEPS CHECKPOINTS
"""

import gc
import json
import sys
import threading
import tracemalloc

import torch
from long_training import rss, storages
from torch.nn import functional

from mgpu_core import TrainStep
from mgpu_core.tools.mnist.model import build_model


def checkpoint(steps):
    tensors, nbytes = storages()
    held = {
        "steps": steps,
        "tensors": tensors,
        "tensor bytes": nbytes,
        "threads": threading.active_count(),
        "traced": tracemalloc.get_traced_memory()[0],
        "rss": rss(),
    }
    print(json.dumps(held), flush=True)


def main(ranks, steps, checkpoints):
    torch.manual_seed(0)
    net = build_model("simplenet")
    step = TrainStep(net, functional.cross_entropy, torch.optim.AdamW(net.parameters(), lr=1e-4), ["cpu"] * ranks)
    images, labels = torch.randn(16, 1, 28, 28), torch.randint(10, (16,))
    gc.collect()
    gc.disable()
    for _ in range(3_000):  # until Python's lists of free tuples, which the collector has emptied, are full again
        step(images, labels)
    tracemalloc.start()
    for _ in range(20):
        step(images, labels)
    checkpoint(0)
    every = steps // checkpoints
    for number in range(1, steps + 1):
        step(images, labels)
        if number % every == 0:
            checkpoint(number)
    print(json.dumps({"garbage": gc.collect()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
