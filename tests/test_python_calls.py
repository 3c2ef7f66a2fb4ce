"""What the drop-in costs in Python: calls as cProfile counts them, and files between the wrapper and the core."""

import cProfile
import pstats
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import mgpu_core
from mgpu_core.comm import dispatch
from mgpu_core.mnist.model import SimpleNet

PACKAGE = Path(mgpu_core.__file__).parent


def test_a_forward_loss_and_backward_make_few_calls():
    model = mgpu_core.DataParallel(SimpleNet(), ["cpu"] * 4)
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def step():
        cross_entropy(model(x), y).backward()

    for _ in range(5):
        step()
    profile = cProfile.Profile()
    profile.runcall(step)
    assert pstats.Stats(profile).total_calls <= 1_100


def test_scatter_reaches_the_core_in_four_files(monkeypatch):
    files = []

    class Core:
        def __getattr__(self, name):
            return getattr(mgpu_core._core, name)

        def scatter(self, *arguments):
            frame = sys._getframe(1)
            while frame is not None:
                files.append(Path(frame.f_code.co_filename))
                frame = frame.f_back
            mgpu_core._core.scatter(*arguments)

    monkeypatch.setattr(dispatch, "_core", Core())
    mgpu_core.DataParallel(torch.nn.Linear(2, 1), ["cpu"] * 2)(torch.ones(4, 2))
    ours = dict.fromkeys(str(each.relative_to(PACKAGE)) for each in files if each.is_relative_to(PACKAGE))
    assert set(ours) - {"device/compiled.py"} == {
        "comm/dispatch.py",
        "comm/autograd.py",
        "parallel/scatter/forms.py",
        "data_parallel.py",
    }
