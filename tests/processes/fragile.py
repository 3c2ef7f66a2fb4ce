"""Build a net that fails where it is told to, and a step of several processes over it."""

import torch
from fakes.nets import whole
from step.nets import Explode
from torch import nn
from torch.distributed import group
from torch.optim import SGD

from mgpu_core import TrainStep


def total(output, target):
    return (output * target).sum()


def values_of(net):
    return [each.detach().clone() for each in net.parameters()]


class Fragile(nn.Module):
    """Calls `acts[phase]` in that phase of a rank, for rows that begin with a 9."""

    def __init__(self, acts):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.act = acts.get  # which copies share, as they share functions
        whole(self)

    def forward(self, x):
        armed = bool((x == 9).any())
        if armed:
            self.act("forward", int)()
        hidden = self.first(x)
        return self.last(Explode.apply(hidden, self.act("backward", int) if armed else int))


def boom():
    raise RuntimeError("boom at a rank")


def step_of(net, loss_fn=total, optimizer=None, ranks=2, **settings):
    optimizer = optimizer or SGD(net.parameters(), lr=1.0, momentum=0.5)
    return TrainStep(net, loss_fn, optimizer, ["cpu"] * ranks, process_group=group.WORLD, reduction="sum", **settings)


ONES = torch.ones(4, 2)


def batch(rank=None):
    """Four rows of ones; rank `rank` of two has a 9 in its rows."""
    x = ONES.clone()
    if rank is not None:
        x[2 * rank] = 9.0
    return x


def seen_of(call):
    """Return the error that the call raises, in a line."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"
