"""The norm of all gradients together, which clipping needs once a step."""

import math
from collections.abc import Mapping

import torch
from torch.nn.utils import get_total_norm

from mgpu_core.kernels import FlatNorm
from mgpu_core.tools.bench.kernel_case import Side, Task, case_of, full_speed, whole_numbers
from mgpu_core.tools.bench.timing import OURS

TOLERANCE = 1e-4
"""Relative: torch adds squares up in float32."""


def l2_norm(norm: FlatNorm) -> torch.Tensor:
    """Return the norm as a step that clips does: of tensors that were looked at once."""
    return norm.compute()


class Norming:
    """Tensors of whole numbers, whose squares a float64 adds up exactly."""

    turns = 1

    def __init__(self, task: Task) -> None:
        self.nbytes = 4 * task.count
        self._flat = torch.empty(task.count, device=task.device)
        self._made = torch.empty((), device=task.device)
        self._wanted = 0.0
        tensors = list(self._flat.split(list(task.counts)))

        def stacked() -> None:
            self._made = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))

        def total() -> None:
            self._made = get_total_norm(tensors)

        norm = FlatNorm(tensors)

        def ours() -> None:
            self._made = l2_norm(norm)

        self.sides: Mapping[str, Side] = {OURS: ours, "total_norm": total, "foreach_norm": stacked}

    def reset(self, salt: int) -> None:
        self._flat.copy_(whole_numbers(len(self._flat), salt, self._flat.device))
        self._wanted = math.sqrt(self._flat.double().square().sum().item())
        self._made.fill_(math.nan)  # ours lies in the same memory at every call

    def wrong(self) -> int:
        return int(not math.isclose(self._made.item(), self._wanted, rel_tol=TOLERANCE))


CASE = case_of(
    Norming,
    name="l2_norm",
    summary="mgpu_core.kernels.FlatNorm: one norm of many float32 tensors",
    peers=("total_norm", "foreach_norm"),
    traffic="size read",
    bounds=(full_speed(),),
)
