"""The ways to train that are compared: each with a deep copy of the net, so that the user's is never touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.data_parallel import DataParallel
from mgpu_core.devices.graphs import GRAPH_DEVICE
from mgpu_core.devices.transfer import module_to, to_device
from mgpu_core.errors import Error
from mgpu_core.step.graph_cache import WARM_UP
from mgpu_core.step.train_step import TrainStep
from mgpu_core.tools.advise.batches import Batch
from mgpu_core.tools.advise.plan import AdvicePlan
from mgpu_core.trees.module_copy import copy_module

__all__ = ["CAPTURED", "DROP_IN", "ENGINE", "NAMES", "ONE", "StepEngine", "Loop", "Way", "first_line", "makers"]

ONE, DROP_IN, ENGINE, CAPTURED = NAMES = ("one device", "DataParallel", "TrainStep", "TrainStep captured")
"""The simplest first."""


_IN_REPLICA = re.compile(r"Caught \w+ (in replica \d+ on device [\w:]+)")


def makers(plan: AdvicePlan) -> dict[str, Callable[[], Way]]:
    """Return how each way that makes sense on these devices is made, simplest first.

    One rank alone has nothing to split: there the drop-in is the plain loop.  Graphs are for GPUs.
    """
    ways: dict[str, Callable[[], Way]] = {ONE: lambda: Loop(plan, lambda net: net)}
    if len(plan.devices) > 1:
        ways[DROP_IN] = lambda: Loop(plan, lambda net: DataParallel(net, plan.devices))
    ways[ENGINE] = lambda: StepEngine(plan)
    if {each.type for each in plan.distinct_devices} == {GRAPH_DEVICE}:
        ways[CAPTURED] = lambda: StepEngine(plan, capture=True)
    return ways


def first_line(error: BaseException) -> str:
    """Return the error in one line: its type and the first line of its text that says something."""
    rank = _IN_REPLICA.match(str(error))
    where = f" ({rank[1]})" if rank and error.__cause__ else ""
    cause = error.__cause__ if where and error.__cause__ else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return (f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__) + where


def copied(module: Any, device: torch.device) -> Any:
    """Return a deep copy on ``device``, without gradients; objects other than modules are shared."""
    if not isinstance(module, Module):
        return module
    copy = copy_module(module)
    copy.zero_grad(set_to_none=True)
    return module_to(copy, device)


class Way:
    """One way to train.

    Args:
        plan: whose net is copied to the first device.

    Attributes:
        warm_up: steps before the clock counts.
    """

    warm_up = 3

    def __init__(self, plan: AdvicePlan) -> None:
        self.device = plan.devices[0]
        self.net: Module = copied(plan.net, self.device)
        self.loss_fn = copied(plan.loss_fn, self.device)
        self.optimizer = plan.optimizer(list(self.net.parameters()))

    def step(self, batch: Batch) -> None:
        """Make one whole step."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ``Error`` if, after the warm-up, the strategy did not run as named."""

    def close(self) -> None:
        """Let go of threads and memory."""
        del self.net, self.optimizer


class Loop(Way):
    """The loop that everybody writes: zero_grad, forward, loss, backward, step.

    Args:
        wrap: makes the callable of the loop from the copy.
    """

    def __init__(self, plan: AdvicePlan, wrap: Callable[[Module], Module]) -> None:
        super().__init__(plan)
        self._model = wrap(self.net)
        self._moves_inputs = self._model is self.net  # a wrapper splits the batch from where it is

    def loss(self, batch: Batch) -> Any:
        """Forward and loss."""
        count = len(batch) - (self.loss_fn is not None)
        inputs = [self._moved(each) for each in batch[:count]] if self._moves_inputs else batch[:count]
        output = self._model(*inputs)
        return output.mean() if self.loss_fn is None else self.loss_fn(output, self._moved(batch[-1]))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.device)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()

    def close(self) -> None:
        super().close()
        del self._model


class StepEngine(Way):
    """A :class:`mgpu_core.TrainStep`; ``capture``: as CUDA graphs."""

    def __init__(self, plan: AdvicePlan, *, capture: bool = False) -> None:
        super().__init__(plan)
        self.warm_up = WARM_UP + 2 if capture else 3
        self._step = TrainStep(self.net, self.loss_fn, self.optimizer, plan.devices, capture=capture)

    def step(self, batch: Batch) -> None:
        self._step(*batch)

    def check(self) -> None:
        graphs = self._step.graphs
        if graphs is not None and not graphs.replays:
            raise Error(f"not captured: {graphs.reason}")

    def close(self) -> None:
        self._step.close()
