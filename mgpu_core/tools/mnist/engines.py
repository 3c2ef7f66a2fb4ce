"""The engines: three ways to make a step from a batch, with the same methods, so that the loop is one for all.

`mgpu_core.TrainStep` is one of them as it is; `LoopStep` gives its methods to the lines that any PyTorch user writes.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mgpu_core.data_parallel import DataParallel
from mgpu_core.step.checkpoint import load_state, state_of
from mgpu_core.step.train_step import TrainStep
from mgpu_core.tools.mnist.config import Config


class LoopStep:
    """Forward, loss, backward and update as everybody writes them; unchanged with `mgpu_core.DataParallel`.

    Args:
        model: the network, or a `DataParallel` around it.
        optimizer: over its parameters.
        accumulate: calls per update.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
        self._model, self._optimizer, self._accumulate = model, optimizer, accumulate
        self._net = model.module if isinstance(model, DataParallel) else model
        self._rows: list[int] = []

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the batch's mean loss, without a graph; the last of `accumulate` calls makes the update."""
        loss = functional.cross_entropy(self._model(images), labels)
        # All rows of an update count the same: backward begins with their number instead of a one.
        loss.backward(torch.full_like(loss, len(labels)))
        self._rows.append(len(labels))
        if len(self._rows) == self._accumulate:
            self.flush()
        return loss.detach()

    def flush(self) -> None:
        """Make the update of the calls since the last one, if there are any, as of one batch with all their rows."""
        if self._rows:
            for parameter in self._net.parameters():
                if parameter.grad is not None:
                    parameter.grad /= sum(self._rows)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._rows.clear()

    @torch.no_grad()
    def evaluate(self, images: torch.Tensor, labels: torch.Tensor, return_outputs: bool = True) -> Any:
        """Return the mean loss, and the outputs (rows, 10), as `TrainStep.evaluate` does where both are wanted."""
        outputs = self._model(images)
        return functional.cross_entropy(outputs, labels), outputs

    def state_dict(self) -> dict[str, Any]:
        """Return copies of network, optimizer and random numbers, and the entries that a `TrainStep` wants besides."""
        return state_of(self._net, self._optimizer) | {"steps": 0, "loss_scale": {}, "shares": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of any engine. `ValueError` if it does not fit."""
        load_state(state, self._net, self._optimizer)

    def close(self) -> None:
        """End the threads of the wrapper; the step is over."""
        if isinstance(self._model, DataParallel):
            self._model.close()


def make_engine(config: Config, net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainStep | LoopStep:
    """Return the engine that `config` names, around `net` on the first of its devices."""
    if config.engine == "plain":
        return LoopStep(net, optimizer, config.accumulate)
    if config.engine == "drop-in":
        return LoopStep(DataParallel(net, device_ids=config.devices()), optimizer, config.accumulate)
    return TrainStep(
        net,
        functional.cross_entropy,
        optimizer,
        device_ids=config.devices(),
        accumulate=config.accumulate,
        amp_dtype=None if config.amp is None else getattr(torch, config.amp),
        # Measuring which way is faster would give another rounding in another run.
        workers="caller",
        # The loop looks at the losses, at the same point and with the same message for every engine.
        error_if_nonfinite=False,
    )
