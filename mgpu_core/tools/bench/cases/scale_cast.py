"""float32 to bfloat16 with a factor: how gradients are made smaller for the way."""

from collections.abc import Mapping

import torch

from mgpu_core.kernels import scale_cast
from mgpu_core.tools.bench.kernel_case import POISON, Side, Task, case_of, differing, full_speed, whole_numbers
from mgpu_core.tools.bench.timing import OURS

SCALE = 0.125


class Casting:
    """Whole numbers up to 12, of which an eighth is exact in bfloat16."""

    turns = 1

    def __init__(self, task: Task) -> None:
        self.nbytes = 6 * task.count
        tensor = torch.empty(task.count, device=task.device)
        out = torch.empty(task.count, device=task.device, dtype=torch.bfloat16)
        self._tensor, self._out = tensor, out
        self.sides: Mapping[str, Side] = {
            OURS: lambda: scale_cast(tensor, SCALE, torch.bfloat16, out=out),
            "mul_out": lambda: torch.mul(tensor, SCALE, out=out),
            "mul_to": lambda: out.copy_((tensor * SCALE).to(torch.bfloat16)),
        }

    def reset(self, salt: int) -> None:
        self._tensor.copy_(whole_numbers(len(self._tensor), salt, self._tensor.device))
        self._out.fill_(POISON)

    def wrong(self) -> int:
        return differing(self._out.float(), self._tensor / 8)


CASE = case_of(
    Casting,
    name="scale_cast",
    summary="mgpu_core.kernels.scale_cast: float32 x 1/8 to bfloat16",
    peers=("mul_out", "mul_to"),
    traffic="size read + size / 2 written",
    pieces=False,
    bounds=(full_speed(),),
)
