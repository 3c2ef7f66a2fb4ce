"""The engines: three ways to make an update from batches, with the same methods, so that the loop is one for all.

A window is the batches of one update: `accumulate` of them, and fewer at the end of an epoch, which no window
crosses, because a checkpoint is written there. Its gradient is the one of a single batch with all its rows.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from mgpu_core.mnist.config import Config
from mgpu_core.train.step import TrainStep
from mgpu_core.wrapper import DataParallel

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images and their labels."""


class Engine(Protocol):
    """The interface that the loop calls; the loop sets the network's mode, training or not."""

    def train(self, window: Sequence[Batch]) -> list[torch.Tensor]:
        """Make one update. Return each batch's mean loss, on the device, so that the host does not wait."""

    def correct(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return how many images the network names right, on the device."""

    def loss_scale(self) -> dict[str, Any]:
        """Return the loss scale's state, for a checkpoint; empty where there is none."""

    def scale_losses(self, state: dict[str, Any]) -> None:
        """Go on from that state."""

    def close(self) -> None:
        """Leave the network as a plain one, with memory of its own; the engine is not used any more."""


class _TrainStep:
    """`mgpu_core.TrainStep`: replicas that live on, gradients summed during backward, a fused update."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step

    def train(self, window: Sequence[Batch]) -> list[torch.Tensor]:
        *first, (images, labels) = window
        # Not `TrainStep(accumulate=...)`: only the window knows whether it is the epoch's last, shorter one.
        with self._step.no_sync():
            losses = [self._step(*batch) for batch in first]
        return [*losses, self._step(images, labels)]

    def correct(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        _, outputs = self._step.evaluate(images, labels, return_outputs=True)
        return _correct(outputs, labels)

    def loss_scale(self) -> dict[str, Any]:
        return self._step.loss_scale.state_dict()

    def scale_losses(self, state: dict[str, Any]) -> None:
        self._step.loss_scale.load_state_dict(state)

    def close(self) -> None:
        self._step.close()


class _Loop:
    """The lines that any PyTorch user writes; they work unchanged with `mgpu_core.DataParallel`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def train(self, window: Sequence[Batch]) -> list[torch.Tensor]:
        rows = sum(len(labels) for _, labels in window)
        losses = []
        self._optimizer.zero_grad()
        for images, labels in window:
            loss = functional.cross_entropy(self._model(images), labels)
            # Multiplied by its share of the rows: backward begins with that number instead of a one.
            loss.backward(torch.full_like(loss, len(labels) / rows))
            losses.append(loss.detach())
        self._optimizer.step()
        return losses

    @torch.no_grad()
    def correct(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _correct(self._model(images), labels)

    def loss_scale(self) -> dict[str, Any]:
        return {}

    def scale_losses(self, state: dict[str, Any]) -> None:
        """Do nothing: in full precision losses are not scaled."""

    def close(self) -> None:
        if isinstance(self._model, DataParallel):
            self._model.close()


def make_engine(
    config: Config, net: nn.Module, optimizer: torch.optim.Optimizer, devices: Sequence[torch.device]
) -> Engine:
    """Return the engine that `config` names, around `net` on the first of `devices`."""
    if config.engine == "plain":
        return _Loop(net, optimizer)
    if config.engine == "drop-in":
        return _Loop(DataParallel(net, device_ids=devices, shares=config.shares), optimizer)
    return _TrainStep(
        TrainStep(
            net,
            functional.cross_entropy,
            optimizer,
            device_ids=devices,
            shares=config.shares,
            amp_dtype=None if config.amp is None else getattr(torch, config.amp),
            capture=config.capture,
            # Measuring which way is faster would give another rounding in another run.
            workers="caller",
            # The loop looks at the losses, at the same point and with the same message for every engine.
            error_if_nonfinite=False,
        )
    )


def _correct(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == labels).sum()
