"""Checkpoints that earlier code has written: files in `checkpoints`, which today's code goes on from.

`STEM_without_workers.pt` is `torch.save(step.state_dict())` after 9 calls; `STEM.pt` is the same by code whose states
said how ranks run, too. A kept file is never made again: when the format grows, add one of the new format by
`PYTHONPATH=tests python tests/step/test_kept_checkpoints.py STEM FILE.pt`.
"""

import sys
from pathlib import Path

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn.functional import mse_loss

import mgpu_core
from mgpu_core import TrainStep

FILES = Path(__file__).parent / "checkpoints"
CALLS = 9
SEED = 7
OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
}
KEPT = [f"{stem}{behind}" for stem in OPTIMIZERS for behind in ("", "_without_workers")]


class Scaled(nn.Module):
    """Two layers, of which the second is in a group of its own, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(2.0))
        self.double()
        with torch.no_grad():
            for index, each in enumerate(self.parameters()):
                each.copy_((torch.arange(each.numel()).reshape(each.shape) % 5 - 2) / (4 + index))

    def forward(self, x):
        return self.scale * self.last(torch.tanh(self.first(x)))


def batch(number):
    """Six rows and their targets, other ones in each call."""
    x = (torch.arange(18.0).double().reshape(6, 3) + number) % 7 / 4 - 1
    return x, x[:, :2] * x[:, 1:]


def training(stem, package):
    """A net and its optimizer, a class of this package."""
    net = Scaled()
    name, options = OPTIMIZERS[stem]
    groups = [{"params": net.first.parameters()}, {"params": net.last.parameters(), "lr": 0.02}]
    return net, getattr(package, name)(groups, **options)


def written(stem):
    """The state that is kept, as today's code makes it."""
    net, optimizer = training(stem, mgpu_core.optim)
    step = TrainStep(net, mse_loss, optimizer, cpu(2))
    for number in range(CALLS):
        step(*batch(number))
    torch.manual_seed(SEED)
    return step.state_dict()


def kept(name):
    """What is in the file, and its optimizer's name here."""
    return torch.load(FILES / f"{name}.pt", weights_only=True), name.split("_")[0]


def on_one_device(stem, calls):
    """The parameters that plain torch has after so many calls."""
    net, optimizer = training(stem, torch.optim)
    for number in range(calls):
        optimizer.zero_grad()
        mse_loss(net(batch(number)[0]), batch(number)[1]).backward()
        optimizer.step()
    return list(net.parameters())


def assert_close(mine, wanted):
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KEPT)
def test_training_goes_on_from_a_kept_file(name, ranks):
    state, stem = kept(name)
    net, optimizer = training(stem, mgpu_core.optim)
    with torch.no_grad():
        net.scale.zero_()  # all comes from the file
        for each in net.parameters():
            each.zero_()
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    step = TrainStep(net, mse_loss, optimizer, cpu(ranks))
    step.load_state_dict(state)
    assert step.steps == CALLS
    assert [group["lr"] for group in optimizer.param_groups] == [OPTIMIZERS[stem][1]["lr"], 0.02]
    drawn = torch.rand(4)
    torch.manual_seed(SEED)
    assert torch.equal(drawn, torch.rand(4))
    assert_close(net.parameters(), on_one_device(stem, CALLS))
    for number in range(CALLS, CALLS + 3):
        step(*batch(number))
    assert_close(net.parameters(), on_one_device(stem, CALLS + 3))
    assert step.steps == CALLS + 3


def shape_of(value):
    """Return the value with types, dtypes and shapes instead of numbers."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shape_of(each) for each in value]
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


@pytest.mark.parametrize("stem", OPTIMIZERS)
def test_todays_format_is_the_kept_one(stem):
    """When it grows: keep the files, and add new ones."""
    state, _ = kept(stem)
    without, _ = kept(f"{stem}_without_workers")
    today = written(stem)
    for each in (today, state, without):
        del each["random"]["accelerators"]  # those of the machine
    assert shape_of(today) == shape_of(without)
    assert state.keys() - without.keys() == {"workers"}
    assert shape_of(without) == shape_of({key: each for key, each in state.items() if key != "workers"})


if __name__ == "__main__":
    torch.save(written(sys.argv[1]), sys.argv[2])
