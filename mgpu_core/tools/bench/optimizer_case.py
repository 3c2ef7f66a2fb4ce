"""Shared by the optimizers' cases: flat parameters, and torch's optimizers on the very same memory.

Every contestant updates the same parameters from the same gradients; each side of torch has its own state, as it makes
it for itself. Three steps from fresh parameters are compared with the same steps in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_core.kernels import segment_table
from mgpu_core.tools.bench.kernel_case import Side, Task, differing, twin_sides, whole_numbers
from mgpu_core.tools.bench.timing import OURS

STYLES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
"""torch's three ways to do a step."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Flat:
    """The arguments of our step: flat tensors, the state among them, and the tables."""

    parameters: torch.Tensor
    gradients: torch.Tensor
    states: Sequence[torch.Tensor]
    segments: torch.Tensor
    groups: torch.Tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All of them, in the order in which our functions take them."""
        return self.parameters, self.gradients, *self.states, self.segments, self.groups


@dataclass(frozen=True)
class Optimizer:
    """The differences between optimizers.

    Attributes:
        states: how many flat tensors it keeps.
        untouched: their value before the first step.
        groups: the group table.
        step: one step of ours.
        truth: the same in plain torch, for float64 tensors.
        torchs: torch's optimizer, of parameters and a style.
        twin: one step of a twin, given its module; None if it has none.
    """

    states: int
    untouched: float
    groups: torch.Tensor
    step: Callable[[Flat], object]
    truth: Callable[[Flat], object]
    torchs: Callable[..., torch.optim.Optimizer]
    twin: Callable[[Any, Flat], object] | None = None


class Optimizing:
    """One flat buffer of parameters in segments, and those segments as parameters of torch's optimizers."""

    turns = 3

    def __init__(self, optimizer: Optimizer, task: Task) -> None:
        # Parameters and states are read and written, gradients read.
        self.nbytes = 4 * task.count * (2 * (1 + optimizer.states) + 1)
        self._optimizer, self._salt = optimizer, 0
        fresh = [torch.empty(task.count, device=task.device) for _ in range(2 + optimizer.states)]
        segments = segment_table(task.counts, device=task.device)
        self._flat = Flat(fresh[0], fresh[1], fresh[2:], segments, optimizer.groups.to(task.device))
        self._torchs = {
            style: optimizer.torchs(self._parameters(task.counts), **given) for style, given in STYLES.items()
        }
        self.sides = self._ways(task)

    def _ways(self, task: Task) -> Mapping[str, Side]:
        flat, optimizer = self._flat, self._optimizer
        ways: dict[str, Side] = {OURS: lambda: optimizer.step(flat)}
        ways |= {style: torchs.step for style, torchs in self._torchs.items()}
        if (step := optimizer.twin) is not None:
            ways |= twin_sides(task, lambda twin: step(twin, flat))
        return ways

    def _parameters(self, counts: Sequence[int]) -> list[torch.nn.Parameter]:
        """Return the segments as parameters with gradients: the same memory."""
        pieces = (flat.split(list(counts)) for flat in (self._flat.parameters, self._flat.gradients))
        parameters = []
        for parameter, gradient in zip(*pieces, strict=True):
            parameters.append(torch.nn.Parameter(parameter))
            parameters[-1].grad = gradient
        return parameters

    def reset(self, salt: int) -> None:
        self._salt = salt
        self._fill(self._flat)
        for torchs in self._torchs.values():
            torchs.state.clear()

    def _fill(self, flat: Flat) -> None:
        for index, tensor in enumerate((flat.parameters, flat.gradients)):
            tensor.copy_(whole_numbers(len(tensor), self._salt + index, tensor.device))
        for state in flat.states:
            state.fill_(self._optimizer.untouched)
        flat.segments[:, 3] = 0

    def wrong(self) -> int:
        flat = self._flat
        parameters, gradients = (
            torch.empty_like(tensor, dtype=torch.float64) for tensor in (flat.parameters, flat.gradients)
        )
        states = [torch.empty_like(each, dtype=torch.float64) for each in flat.states]
        truth = Flat(parameters, gradients, states, flat.segments.clone(), flat.groups)
        self._fill(truth)
        for _ in range(self.turns):
            self._optimizer.truth(truth)
        return differing(flat.parameters.double(), truth.parameters, TOLERANCE)
