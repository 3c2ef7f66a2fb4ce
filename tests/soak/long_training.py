"""A long training with everything in it, run by test_soak.py in a process of its own.

Prints one JSON line per checkpoint: what the process holds then.  The garbage collector is off between the warm-up and
the end, so that nothing that depends on it looks clean; at a checkpoint there is no graph, no input and no gradient.

    python -P long_training.py RANKS STEPS CHECKPOINTS
"""

import ctypes
import gc
import json
import os
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import nn

import mgpu_core

FEATURES, CLASSES = 6, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(8, CLASSES)
        self.extra = nn.Linear(8, CLASSES)

    def forward(self, x, mask=None, *, table, scale=1.0, use_extra=False, fail=False):
        hidden = self.drop(torch.relu(self.norm(self.first(x + table))))
        if fail and (x[:, 0] > 0).any():
            raise ValueError("this replica was told to fail")
        out = self.last(hidden) * scale
        if use_extra:
            out = out + self.extra(hidden)
        return {"out": out if mask is None else out * mask, "rows": [len(x) * 0, None, "text"]}


class Training:
    """Steps of many kinds, each a function of its number."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.model = mgpu_core.DataParallel(Net(), ["cpu"] * ranks)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.table = torch.ones(FEATURES)
        self.failures = self.refusals = 0

    def step(self, number):
        few = number % 5 == 4  # fewer rows than ranks, down to none: not in training, which needs two rows per rank
        self.model.train(not few)
        rows = number % self.ranks if few else 2 * self.ranks + number % 7
        inputs = {
            "x": torch.randn(rows, FEATURES),
            "mask": torch.ones(rows, 1) if number % 3 else None,
            "table": mgpu_core.Replicate(self.table),
            "scale": 1.0 + number % 2,
            "use_extra": number % 4 == 0,
        }
        if number % 17 == 0:
            self.fail(inputs, number)
        elif number % 23 == 0:
            inputs["mask"] = torch.ones(rows + 1, 1)
            with suppress(ValueError):
                self.model(**inputs)
                return
            self.refusals += 1
        elif number % 11 == 0:
            with torch.inference_mode() if number % 2 else torch.no_grad():
                self.model(**inputs)
        else:
            self.train(inputs, torch.autocast("cpu", dtype=torch.bfloat16) if number % 13 == 0 else nullcontext())

    def fail(self, inputs, number):
        """The last replica fails, or all of them; without rows none."""
        x = inputs["x"]
        x[:, 0] = -1
        x[-1:, 0] = 1
        if number % 2:
            x[:, 0] = 1
        try:
            self.model(**inputs, fail=True)
        except ValueError:
            self.failures += 1

    def train(self, inputs, autocast):
        with autocast:
            out = self.model(**inputs)["out"]
        self.optimizer.zero_grad()
        out.float().pow(2).sum().backward()
        self.optimizer.step()


def storages():
    """Bytes of all tensors that are alive, each storage once."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(found.values())


def rss():
    """Bytes of memory of the process; None where /proc does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


class Mallinfo(ctypes.Structure):
    """malloc.h's: ten sizes, of which uordblks is what small allocations hold, hblkhd what large ones do."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "hblkhd", *"ef", "uordblks", *"gh")]


MALLINFO = getattr(ctypes.CDLL(None), "mallinfo2", None)
if MALLINFO is not None:
    MALLINFO.restype = Mallinfo


def malloced():
    """Bytes that were allocated and not freed, by C and C++, tensors too; None where the C library does not say."""
    if MALLINFO is None:
        return None
    found = MALLINFO()
    return found.uordblks + found.hblkhd


def checkpoint(training, steps):
    training.optimizer.zero_grad()
    tensors, nbytes = storages()
    held = {
        "steps": steps,
        "tensors": tensors,
        "tensor bytes": nbytes,
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "blocks": sys.getallocatedblocks(),
        "malloc": malloced(),
        "rss": rss(),
        "failures": training.failures,
        "refusals": training.refusals,
    }
    print(json.dumps(held), flush=True)


def main(ranks, steps, checkpoints):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tiny tensors: on a busy machine threads would mostly wait for each other
    training = Training(ranks)
    every = steps // checkpoints
    for number in range(every):
        training.step(number)
    gc.collect()
    gc.disable()
    for number in range(every):  # the collector emptied Python's lists of free objects, too
        training.step(number)
    training.failures = training.refusals = 0
    checkpoint(training, 0)
    for number in range(1, steps + 1):
        training.step(number)
        if number % every == 0:
            checkpoint(training, number)
    print(json.dumps({"garbage": gc.collect()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
