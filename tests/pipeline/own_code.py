"""Nets whose own code between layers does what a tracer could not follow; each is cut between its blocks."""

import dataclasses
import threading
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    """A layer without a list in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Plain(nn.Module):
    """Four blocks, one after the other."""

    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class SkipBetween(Plain):
    def forward(self, x):
        early = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](early) + early) + early


class JoinedBetween(Plain):
    """As in a U-Net."""

    def __init__(self):
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        early = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.join(torch.cat([self.blocks[2](early), early], 1)))


class TwoOutputs(Plain):
    """The loss reads a tensor of an earlier stage."""

    def forward(self, x):
        early = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](early)), early


class Checkpointed(Plain):
    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedOverTheBorder(Plain):
    def forward(self, x):
        x = self.blocks[0](x)
        x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=False)
        return self.blocks[3](x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        x += 1.0
        return torch.tanh(self.linear(x))


class InPlaceFirst(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[0] = self.blocks[1] = self.blocks[0].linear
        self.blocks[1] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.blocks[2] = InPlace()


class ViewOfAChangedBase(Plain):
    def forward(self, x):
        early = self.blocks[1](self.blocks[0](x)).clone()
        half, flat = early[:, :4], early.view(-1, WIDTH)
        early.mul_(2.0)
        x = self.blocks[2](early)
        return self.blocks[3](x) * flat + torch.cat([half, half], 1)


class CalledAgain(Plain):
    def forward(self, x):
        return self.blocks[0](super().forward(x))


class EarlyExit(Plain):
    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        if float(x.detach().sum()) > 0:
            return x
        return self.blocks[3](self.blocks[2](x))


class InAThread(Plain):
    """Another thread, whose nodes autograd numbers by themselves."""

    def forward(self, x):
        x = self.blocks[2](self.blocks[1](self.blocks[0](x)))
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.relu(x * 2)))
        thread.start()
        thread.join()
        return self.blocks[3](found[0])


class Attribute(Plain):
    """What the code keeps on the module before a border, it reads after it."""

    def forward(self, x):
        self.saved = x * 3
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](x) + self.saved)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.exp()


class OwnFunction(Plain):
    def forward(self, x):
        early = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](early) + Exponential.apply(early))


class CompiledLayers(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[1].compile(backend="eager")
        self.blocks[2] = torch.compile(self.blocks[2], backend="eager")


@dataclasses.dataclass
class Carried:
    x: Any


class OfDataclasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, carried):
        return Carried(torch.tanh(self.linear(carried.x)))


class Dataclass(Plain):
    def __init__(self):
        super().__init__(OfDataclasses)

    def forward(self, x):
        return super().forward(Carried(x)).x


class Cache:
    def __init__(self):
        self.kept = []


class OfACache(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x, cache):
        x = torch.tanh(self.linear(x))
        if cache.kept:
            x = x + cache.kept[-1]
        cache.kept.append(x)
        return x


class CacheObject(Plain):
    """A layer takes tensors of earlier stages out of an object."""

    def __init__(self):
        super().__init__(OfACache)

    def forward(self, x):
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Scaled(Plain):
    """A parameter around layers, used in each stage."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.1, dtype=torch.float64))

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x * self.scale))
        return self.blocks[3](self.blocks[2](x) * self.scale) * self.scale


class ScaledAtTheEnd(Scaled):
    def forward(self, x):
        return Plain.forward(self, x) * self.scale


class FrozenBody(Plain):
    def forward(self, x):
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](x))


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[3].linear.weight = self.blocks[0].linear.weight


class WrittenBetween(Plain):
    def forward(self, x):
        kept = torch.zeros_like(x)
        x = self.blocks[1](self.blocks[0](x))
        kept[:, :] = x
        y = self.blocks[2](kept)
        z = torch.zeros_like(y)
        z[:, :4] = x[:, :4]
        y = self.blocks[3](y) * 1
        y += x
        return y + z


class Hooks(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        self.blocks[2].register_forward_hook(lambda _, args, output: output * 2 + args[0])
        self.register_forward_hook(lambda _, args, output: output + args[0])


def normed():
    with warnings.catch_warnings(action="ignore"):
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH, dtype=torch.float64))


class WeightsByAHook(Plain):
    def __init__(self):
        super().__init__(normed)


class Method(Plain):
    """A bound method in an attribute."""

    def __init__(self):
        super().__init__()
        self.run = super().forward

    def forward(self, x):
        return self.run(x) * 2


NETS = [
    Plain, SkipBetween, JoinedBetween, TwoOutputs, Checkpointed, CheckpointedOverTheBorder, InPlaceFirst,
    ViewOfAChangedBase, CalledAgain, EarlyExit, InAThread, Attribute, OwnFunction, CompiledLayers, Dataclass,
    CacheObject, Scaled, ScaledAtTheEnd, FrozenBody, Tied, WrittenBetween, Hooks, WeightsByAHook, Method,
]  # fmt: skip
