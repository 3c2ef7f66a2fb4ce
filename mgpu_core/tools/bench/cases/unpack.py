"""A flat tensor into many: the way back, after gradients were summed."""

from collections.abc import Mapping

import torch

from mgpu_core.kernels import unpack
from mgpu_core.tools.bench.kernel_case import POISON, Side, Task, case_of, differing, full_speed, whole_numbers
from mgpu_core.tools.bench.timing import OURS


class Unpacking:
    """A flat tensor of whole numbers, and the tensors that must hold it together."""

    turns = 1

    def __init__(self, task: Task) -> None:
        self.nbytes = 8 * task.count
        self._flat = torch.empty(task.count, device=task.device)
        self._tensors = [torch.empty(count, device=task.device) for count in task.counts]
        views = list(self._flat.split(list(task.counts)))
        self.sides: Mapping[str, Side] = {
            OURS: lambda: unpack(self._flat, self._tensors),
            "foreach_copy": lambda: torch._foreach_copy_(self._tensors, views),
        }

    def reset(self, salt: int) -> None:
        self._flat.copy_(whole_numbers(len(self._flat), salt, self._flat.device))
        for tensor in self._tensors:
            tensor.fill_(POISON)

    def wrong(self) -> int:
        return differing(torch.cat(self._tensors), self._flat)


CASE = case_of(
    Unpacking,
    name="unpack",
    summary="mgpu_core.kernels.unpack: a flat float32 tensor into many",
    peers=("foreach_copy",),
    traffic="size read + size written",
    many=True,
    bounds=(full_speed(),),
)
