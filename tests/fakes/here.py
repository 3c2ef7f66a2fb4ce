"""The place of the cases in ``tests/cuda/one_gpu``: one GPU with several ranks on it, or the CPU if there is none."""

import copy
import os
import threading
from contextlib import contextmanager, nullcontext
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional

import mgpu_core
from mgpu_core.devices import streams

DEVICE = "MGPU_TEST_DEVICE"  # a variable: `cpu` runs the cases on the CPU of a machine with a GPU
PURPOSES = get_args(streams.Purpose)
OPTIMIZERS = ("sgd", "adamw", "lion")


def device_of_the_cases():
    has_gpu = bool(torch.version.cuda) and torch.cuda.is_available()
    return torch.device(os.environ.get(DEVICE) or ("cuda:0" if has_gpu else "cpu"))


class Here:
    """Where the ranks are, and what differs between a GPU and the CPU.

    Attributes:
        device: of all ranks, unless a case adds the CPU.
        is_gpu: whether it is a GPU.
        figures: lines for the summary of a run, by name.
    """

    def __init__(self, device):
        self.device, self.is_gpu = device, device.type == "cuda"
        self.name = str(device)
        self.figures = {}

    def team(self, ranks):
        return [self.name] * ranks

    def wait(self):
        if self.is_gpu:
            torch.cuda.synchronize()

    def sleep(self, milliseconds):
        """Put the current stream to sleep: whoever does not wait for it reads what was there before."""
        if self.is_gpu:
            torch.cuda._sleep(int(milliseconds * 2e6))

    def poison(self):
        """Overwrite the memory that the allocator would give out next: whoever still reads freed memory reads NaN."""
        if self.is_gpu:
            for power in (9, 12, 14, 16, 18, 20, 22):
                for _ in range(3):
                    torch.full((1 << power,), float("nan"), device=self.device)

    @contextmanager
    def late(self, milliseconds=1.0):
        """Let the package's own streams begin late, as they may on a busy GPU."""
        if not self.is_gpu:
            yield
            return
        own = {streams.own_stream(each, self.device.index).stream_id for each in PURPOSES}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.accelerator, "set_stream", self._sleeping(torch.accelerator.set_stream, own, milliseconds)
            )
            yield

    def _sleeping(self, set_stream, own, milliseconds):
        def entered(stream):
            set_stream(stream)
            if stream.stream_id in own or streams.is_for_captures(stream):
                self.sleep(milliseconds)

        return entered

    def net(self, *, dropout=0.0, width=96, dtype=torch.float64, norm=False):
        torch.manual_seed(0)
        layers = [nn.Linear(20, width), nn.Tanh(), nn.Dropout(dropout)]
        layers += [nn.BatchNorm1d(width)] if norm else []
        for _ in range(3):
            layers += [nn.Linear(width, width), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(width, 3)).to(self.device, dtype)

    def batches(self, steps, *, rows=24, dtype=torch.float64, where=None):
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            x = torch.randn(rows, 20, generator=generator, dtype=dtype)
            y = torch.randint(0, 3, (rows,), generator=generator)
            yield x.to(where or self.device), y.to(where or self.device)

    def train_alike(
        self, team, name="sgd", *, net=None, steps=25, where=None, each=None, tolerance=1e-9, **options
    ):  # fmt: skip
        """Make steps of a TrainStep next to a bare loop with torch's optimizer; return the TrainStep."""
        net = net or self.net()
        alone = copy.deepcopy(net)
        step = mgpu_core.TrainStep(net, functional.cross_entropy, optimizer_of(name, net.parameters()), team, **options)
        self.compare(step, alone, name, steps=steps, where=where, each=each, tolerance=tolerance)
        step.check_replicas()
        return step

    def compare(self, step, alone, name, *, steps=25, where=None, each=None, tolerance=1e-9):
        """Raise unless the losses and the parameters of a step are those of a bare loop over another net."""
        reference = optimizer_of(name, alone.parameters(), theirs=True)
        losses, wanted = [], []
        for x, y in self.batches(steps, where=where):
            losses.append(step(x, y))
            reference.zero_grad()
            loss = functional.cross_entropy(alone(x.to(self.device)), y.to(self.device))
            loss.backward()
            reference.step()
            wanted.append(loss.detach())
            if each is not None:
                each()
        torch.testing.assert_close(torch.stack(losses).cpu(), torch.stack(wanted).cpu(), rtol=0, atol=tolerance)
        alike(step.module, alone, tolerance * 10)

    def stream(self):
        """Return a context with a stream of the user's, which waits for the current one and is waited for."""
        return _users_stream() if self.is_gpu else nullcontext()


@contextmanager
def _users_stream():
    own, before = torch.cuda.Stream(), torch.cuda.current_stream()
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield own
    before.wait_stream(own)


def optimizer_of(name, parameters, *, theirs=False):
    """Return one of ours, or torch's that computes the same; torch has no Lion."""
    home = torch.optim if theirs else mgpu_core.optim
    if name == "sgd":
        return home.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "adamw":
        return home.AdamW(parameters, lr=1e-3)
    return mgpu_core.optim.Lion(parameters, lr=1e-3)


def alike(one, other, tolerance=1e-9):
    """Raise unless two nets have the same parameters and buffers, up to a relative difference."""
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        a, b = a.double().cpu(), b.double().cpu()
        difference = float((a - b).abs().max() / (1e-30 + b.abs().max())) if a.numel() else 0.0
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"  # also where it is NaN


def in_threads(work, count):
    """Run ``work(index)`` in threads; raise the first failure, with their number."""
    errors = []

    def run(index):
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise AssertionError(f"{len(errors)} of {count} threads failed; the first: {errors[0]!r}") from errors[0]
