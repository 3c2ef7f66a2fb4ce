"""The history of a training: one record per epoch, the trained network, and the traffic between ranks.

Losses are kept for every step, to compare engines; they are read from the device once
per epoch, so keeping them does not make the host wait in every step.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from mgpu_core import _core

Counters = dict[tuple[str, str, int], tuple[int, int]]
"""(operation, algorithm, rank) to (calls, bytes)."""


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images.

    Attributes:
        number: from 1.
        loss: the mean over the images of the epoch, as they were seen.
        accuracy: on the test images after the epoch, 0..1.
        seconds: of the steps, without the test.
        images_per_second: training images over `seconds`.
        step_losses: the mean loss of each step's batch.
    """

    number: int
    loss: float
    accuracy: float
    seconds: float
    images_per_second: float
    step_losses: list[float]

    def check(self) -> None:
        """Raise `TypeError` unless all of it is numbers, as in a file it might not be."""
        numbers = [self.number, self.loss, self.accuracy, self.seconds, self.images_per_second, *self.step_losses]
        if not isinstance(self.step_losses, list) or not all(type(each) in (int, float) for each in numbers):
            raise TypeError("not all of it is numbers")


@dataclass
class History:
    """The course of one training.

    Attributes:
        net: the trained network itself, without wrapper, on the first of `devices`.
        devices: one entry per rank.
        epochs: all epochs, those before a resume included.
        resumed_after: how many of them came out of the checkpoint.
        counters: calls and bytes of the core's collectives in this run; empty for the plain engine.
    """

    net: nn.Module
    devices: list[torch.device]
    epochs: list[Epoch] = field(default_factory=list)
    resumed_after: int = 0
    counters: Counters = field(default_factory=dict)

    @property
    def step_losses(self) -> list[float]:
        """The losses of all steps, in order."""
        return [loss for epoch in self.epochs for loss in epoch.step_losses]


def counters_since(before: Counters) -> Counters:
    """Return by how much `mgpu_core._core.counters()`, which count for the process, have grown since `before`."""
    grown = {}
    for key, (calls, nbytes) in _core.counters().items():
        calls_before, nbytes_before = before.get(key, (0, 0))
        if calls > calls_before:
            grown[key] = (calls - calls_before, nbytes - nbytes_before)
    return grown
