"""The drop-in on a GPU trains as the plain module does, on teams of one GPU and of a GPU and the CPU."""

import copy

import pytest
import torch

import mgpu_core

TEAMS = [[0], [0, 0], [0, 0, 0, 0], ["cuda:0", "cpu"]]


def train(net, forward, device, steps=5):
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = torch.randn(10, 20, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (10,), generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(forward(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_training_is_one_devices(gpu, team):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)).double().to(gpu)
    wrapped = copy.deepcopy(plain)
    dp = mgpu_core.DataParallel(wrapped, team)
    torch.testing.assert_close(train(wrapped, dp, gpu), train(plain, plain, gpu), rtol=1e-9, atol=1e-9)
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("team", TEAMS, ids=str)
def test_inputs_from_the_host(gpu, team):
    net = torch.nn.Linear(20, 3).double().to(gpu)
    dp = mgpu_core.DataParallel(net, team)
    x = torch.randn(9, 20, dtype=torch.float64)
    for given in (x, x.pin_memory()):
        torch.testing.assert_close(dp(given), net(x.to(gpu)), rtol=1e-12, atol=1e-12)
