"""Two nets that train against each other, by two steps: the second sees the first one's net inside its own."""

import copy

import torch
from torch import nn

from mgpu_core import TrainStep
from mgpu_core.optim import SGD, Adam

REAL = torch.ones(8, 2, dtype=torch.float64, device="cpu")
WANTED = torch.ones(8, 1, dtype=torch.float64, device="cpu")


def judged(judgement, wanted):
    return ((judgement - wanted) ** 2).mean()


class Chain(nn.Module):
    def __init__(self, maker, judge):
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, x):
        return self.judge(self.maker(x))


class Adversaries:
    """A maker and its judge, over devices, and once more on the first one by plain torch.

    Args:
        devices: of both steps.
        freezes: the judge is frozen while the maker is trained.
        settings: of both steps.
    """

    def __init__(self, devices, freezes, **settings):
        torch.manual_seed(0)
        self.index, self.freezes = torch.device(devices[0]), freezes
        self.maker = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(self.index)
        self.judge = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double().to(self.index)
        self.alone = copy.deepcopy(Chain(self.maker, self.judge))
        self.by_alone = Adam(self.alone.maker.parameters(), lr=0.01), SGD(self.alone.judge.parameters(), lr=0.1)
        by_maker, by_judge = Adam(self.maker.parameters(), lr=0.01), SGD(self.judge.parameters(), lr=0.1)
        self.judging = TrainStep(self.judge, judged, by_judge, devices, **settings)
        self.making = TrainStep(Chain(self.maker, self.judge), judged, by_maker, devices, **settings)

    def round(self, seed):
        """One step of each, in both worlds: whether the losses and all values are equal."""
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
        x, real, wanted = (each.to(self.index) for each in (x, REAL, WANTED))
        with torch.no_grad():
            made, made_alone = torch.cat([real, self.maker(x)]), torch.cat([real, self.alone.maker(x)])
        by_maker, by_judge = self.by_alone
        told = torch.cat([wanted, -wanted])
        losses = [self.judging(made, told) - self._alone(self.alone.judge, made_alone, told, by_judge)]
        self.judge.requires_grad_(not self.freezes)
        losses.append(self.making(x, wanted) - self._alone(self.alone, x, wanted, by_maker))
        self.judge.requires_grad_(True)
        for each in (self.judging, self.making):
            each.check_replicas()
        return max(map(abs, losses)) < 1e-9 and self.far() < 1e-9

    def _alone(self, net, inputs, wanted, optimizer):
        self.alone.zero_grad()
        loss = judged(net(inputs), wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def far(self):
        """The largest difference between parameters."""
        pairs = zip(self.making.module.parameters(), self.alone.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)
