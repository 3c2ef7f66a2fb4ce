"""Models to cut over several devices, each with inputs, a target, a loss and split points for up to four stages."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())))


class Lstm(nn.Module):
    """Nested values on the way: an output and a pair of states."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.first = nn.LSTM(4, 5, batch_first=True)
        self.second = nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x, scale=None):
        states, _ = self.first(self.embed(x))
        states, (last, _) = self.second(states)
        logits = self.head(states[:, -1] + last.transpose(0, 1)[:, 0])
        return {"logits": logits if scale is None else logits * scale, "none": None}


class Gpt(nn.Module):
    """Embeddings that are tied to the head: the first and the last stage use one Parameter."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        _, length = tokens.size()
        x = self.tokens(tokens) + self.positions[:length]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UNet(nn.Module):
    """Values of the first stages that the last ones read."""

    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        wide = torch.tanh(self.down(x))
        deep = torch.tanh(self.deep(wide))
        middle = torch.tanh(self.middle(deep))
        return self.last(torch.cat([wide, self.up(torch.cat([deep, middle], 1))], 1))


def resnet():
    from torchvision.models import resnet18

    return resnet18(num_classes=4)


def _first(output):
    return output["logits"] if isinstance(output, dict) else output


def mse(output, target):
    """The mean squared error, by operations that the fake accelerator has."""
    return (output - target).square().mean()


def loss_fn(output, target):
    """The mean squared error, or the cross entropy of whole numbers."""
    output = _first(output)
    if target.is_floating_point():
        return mse(output, target)
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Stack(NamedTuple):
    make: Any
    x: torch.Tensor
    target: torch.Tensor
    split_points: tuple[str, ...]

    def points(self, stages):
        """Split points for this number of stages, spread over the net."""
        return [self.split_points[len(self.split_points) * i // stages] for i in range(1, stages)]

    def net(self):
        torch.manual_seed(1)
        return self.make().double()


def _numbers(*shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)), device="cpu")


STACKS = {
    "mlp": Stack(Mlp, _numbers(8, 6), _numbers(8, 6), tuple(map(str, range(8)))),
    "lstm": Stack(Lstm, _numbers(8, 4, 3), _numbers(8, 2), ("embed", "first", "second", "head")),
    "gpt": Stack(
        Gpt, torch.arange(40).reshape(8, 5) % 11, torch.arange(40).reshape(8, 5) % 7,
        ("tokens", "blocks.0", "blocks.2", "head"),
    ),
    "unet": Stack(UNet, _numbers(8, 1, 6, 6), _numbers(8, 1, 6, 6), ("down", "deep", "middle", "up", "last")),
}  # fmt: skip
