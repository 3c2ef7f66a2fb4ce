"""Training steps that every contestant does alike: the same network, images and SGD, and the wanted parameters.

Weights and images come from seeds, so processes that share nothing have the same ones, and nothing large is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from mgpu_core.tools.mnist.model import CLASSES, build_model

LR = 1e-5
"""Of the timed steps: after thousands of them on one batch no number is denormal, which would be slow."""
CHECKED_LR = 1.0
"""Of a verified step: large enough that parameters which were not updated are seen."""
SEED = 0

Digits = tuple[torch.Tensor, torch.Tensor]
"""Images (rows, 1, 28, 28) and labels (rows,)."""
Step = Callable[[torch.Tensor, torch.Tensor], object]
"""Of images and labels: clears the gradients, forward, loss, backward, update."""
MakeStep = Callable[[nn.Module, SGD], Step]
"""From a network and the optimizer of its parameters to a way to train it."""


@dataclass(frozen=True)
class TrainRow:
    """The numbers of one row.

    Attributes:
        model: as `build_model` takes it.
        batch: rows of a step over all ranks.
        ranks: that the rows are cut for.
        steps: in a row, of one turn.
        device: `cpu` or `cuda`.
    """

    model: str
    batch: int
    ranks: int
    steps: int
    device: str = "cpu"

    def network(self) -> nn.Module:
        """Return a fresh network, always with the same weights."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            return build_model(self.model).to(self.device)

    def digits(self, salt: int) -> Digits:
        """Random images and labels, others for each salt."""
        generator = torch.Generator().manual_seed(salt)
        images = torch.randn(self.batch, 1, 28, 28, generator=generator)
        labels = torch.randint(CLASSES, (self.batch,), generator=generator)
        return images.to(self.device), labels.to(self.device)


class Trainee:
    """One contestant's own network, its optimizer and a way to train it.

    Args:
        training: the row.
        make_step: the way.
        rows: of each batch, that this process trains on.
        sgd: the class of its optimizer.
    """

    def __init__(
        self, training: TrainRow, make_step: MakeStep, rows: slice = slice(None), sgd: type[SGD] = SGD
    ) -> None:
        self._training, self._rows = training, rows
        network = training.network()
        self._parameters = list(network.parameters())
        self._optimizer = sgd(self._parameters, lr=LR)
        self._step = make_step(network, self._optimizer)
        self._digits = self._own_rows(training.digits(salt=0))

    def train(self) -> None:
        """Return the steps of one turn, all on one batch."""
        for _ in range(self._training.steps):
            self._step(*self._digits)

    def wrong(self, salt: int) -> int:
        """Wrong gradients and parameters after one step from the first weights on the images of this salt."""
        truth, digits = self._training.network(), self._training.digits(salt)
        self._set_weights()
        self._set_lr(CHECKED_LR)
        self._step(*self._own_rows(digits))
        functional.cross_entropy(truth(digits[0]), digits[1]).backward()
        pairs = zip(self._parameters, truth.parameters(), strict=True)
        count = sum(_wrong_values(parameter, wanted) for parameter, wanted in pairs)
        self._set_weights()
        self._set_lr(LR)
        return count

    @torch.no_grad()
    def _set_weights(self) -> None:
        for parameter, fresh in zip(self._parameters, self._training.network().parameters(), strict=True):
            parameter.copy_(fresh)

    def _set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _own_rows(self, digits: Digits) -> Digits:
        images, labels = digits
        return images[self._rows], labels[self._rows]


@torch.no_grad()
def _wrong_values(parameter: torch.Tensor, wanted: torch.Tensor) -> int:
    """Count the wrong values of a parameter after its step; `wanted` has the weights before it and the gradient."""
    assert wanted.grad is not None
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    updated = wanted - CHECKED_LR * wanted.grad
    return sum(
        int((~torch.isclose(got, want, rtol=1e-3, atol=1e-5)).sum())
        for got, want in ((gradient, wanted.grad), (parameter, updated))
    )


def torch_step(model: nn.Module, optimizer: SGD) -> Step:
    """Return the step that everybody writes: of a bare module, or of one that torch has wrapped."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step
