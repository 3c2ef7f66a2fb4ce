"""The two reference networks: small enough to read, real enough to learn MNIST.

Both take normalised images of shape (batch, 1, 28, 28) and return logits of shape (batch, 10); neither draws random
numbers in its forward, so one seed gives one loss curve on every engine and every number of ranks.
"""

from collections.abc import Callable

import torch
from torch import nn

CLASSES = 10


class SimpleNet(nn.Module):
    """A perceptron with one hidden layer, 784-128-10, and ReLU: 101,770 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(28 * 28, 128)
        self.output = nn.Linear(128, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 1, 28, 28) float to logits (batch, 10)."""
        hidden = torch.relu(self.hidden(images.flatten(1)))
        logits: torch.Tensor = self.output(hidden)
        return logits


class Cnn(nn.Module):
    """Two 3x3 convolutions (32 and 64 channels), a 2x2 max-pool, and two linear layers: 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.hidden = nn.Linear(64 * 12 * 12, 128)
        self.output = nn.Linear(128, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 1, 28, 28) float to logits (batch, 10)."""
        maps = torch.relu(self.conv2(torch.relu(self.conv1(images))))
        pooled = nn.functional.max_pool2d(maps, 2)
        hidden = torch.relu(self.hidden(pooled.flatten(1)))
        logits: torch.Tensor = self.output(hidden)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"simplenet": SimpleNet, "cnn": Cnn}
"""The networks by the names that `--model` takes."""


def build_model(name: str) -> nn.Module:
    """Return a fresh network on the CPU, with weights from torch's CPU generator. `ValueError` for an unknown name."""
    if name not in MODELS:
        raise ValueError(f"model: wanted one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]()
