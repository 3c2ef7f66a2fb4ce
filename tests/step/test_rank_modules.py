"""A loss function that is a module: what it has is the user's own, whatever the number of ranks."""

import pytest
import torch
from fakes.nets import cpu
from step.nets import Linear
from torch import nn
from torch.optim import SGD

from mgpu_core import Rows, TrainStep


def pairs(count):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 3, generator=generator), torch.randint(2, (16,), generator=generator)) for _ in range(count)
    ]


class Centred(nn.Module):
    """Moves a centre in each forward in training, as self-distillation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.fails = False

    def forward(self, output, target):
        loss = nn.functional.cross_entropy(output - self.centre, target)
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(output.mean(0), 0.5)
        if self.fails:
            raise ArithmeticError("behind the centre")
        return loss


def test_a_buffer_that_the_loss_moves_is_the_users(ranks):
    criterion, net = Centred(), Linear()
    step = TrainStep(net, criterion, SGD(net.parameters(), lr=0.0), cpu(ranks))
    expected = torch.zeros(2)
    for x, y in pairs(3):
        step(x, y)
        expected.lerp_(net(x[: -(-16 // ranks)]).mean(0).detach(), 0.5)  # as running statistics: rank 0's rows
        assert torch.allclose(criterion.centre, expected)
    criterion.eval()
    x, y = pairs(1)[0]
    assert torch.allclose(step.evaluate(x, y), criterion(net(x), y))
    assert torch.allclose(criterion.centre, expected)


def test_a_step_that_fails_puts_it_back(ranks):
    criterion, net = Centred(), Linear()
    step = TrainStep(net, criterion, SGD(net.parameters(), lr=0.1), cpu(ranks))
    x, y = pairs(1)[0]
    step(x, y)
    kept = criterion.centre.clone()
    criterion.fails = True
    step.rebuild()
    with pytest.raises(ArithmeticError):
        step(x, y)
    assert torch.equal(criterion.centre, kept)


def test_frozen_parameters_of_a_loss(ranks):
    class Perceptual(nn.Module):
        def __init__(self):
            super().__init__()
            self.eyes = nn.Linear(2, 3).requires_grad_(False)

        def forward(self, output, target):
            return (self.eyes(output) - self.eyes(target)).square().mean()

    criterion, net = Perceptual(), Linear()
    step = TrainStep(net, criterion, SGD(net.parameters(), lr=0.0), cpu(ranks))
    x = torch.randn(16, 3)
    for _ in range(2):
        assert torch.allclose(step(x, x[:, :2]), criterion(net(x), x[:, :2]))
        with torch.no_grad():
            criterion.eyes.weight.mul_(2)


def test_ctc_with_flat_targets(ranks):
    torch.manual_seed(0)
    net, ctc = nn.GRU(3, 7, batch_first=True), nn.CTCLoss(reduction="sum")
    x, frames = torch.randn(5, 12, 3), torch.tensor([12, 11, 10, 12, 9])
    lengths = torch.tensor([3, 5, 2, 4, 1])
    targets = torch.randint(1, 7, (15,))

    def loss_of(outputs, target):
        words, *sizes = target
        scores = outputs[0].log_softmax(-1).transpose(0, 1)  # the rows leave the net along dimension 0
        return ctc(scores, torch.cat(list(words)), *sizes)

    expected = ctc(net(x)[0].log_softmax(-1).transpose(0, 1), targets, frames, lengths)
    gradients = torch.autograd.grad(expected, list(net.parameters()))
    step = TrainStep(net, loss_of, SGD(net.parameters(), lr=0.0), cpu(ranks), reduction="sum")
    loss = step(x, (Rows(targets.split(lengths.tolist())), frames, lengths))
    torch.testing.assert_close(loss, expected.detach())
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-5)
