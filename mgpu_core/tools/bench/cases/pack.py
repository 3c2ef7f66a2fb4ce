"""Many tensors end to end in a flat one, as gradients are packed before they are sent."""

from collections.abc import Mapping

import torch

from mgpu_core.kernels import pack
from mgpu_core.tools.bench.case import at_least
from mgpu_core.tools.bench.kernel_case import (
    POISON,
    Side,
    Task,
    case_of,
    differing,
    full_speed,
    twins,
    whole_numbers,
)
from mgpu_core.tools.bench.timing import OURS


class Packing:
    """Tensors of whole numbers, and a flat tensor that must hold them in their order."""

    turns = 1

    def __init__(self, task: Task) -> None:
        self.nbytes = 8 * task.count
        self._tensors = [torch.empty(count, device=task.device) for count in task.counts]
        self._flat = torch.empty(task.count, device=task.device)
        self._wanted = torch.empty_like(self._flat)
        self.sides = self._ways(task)

    def _ways(self, task: Task) -> Mapping[str, Side]:
        tensors, flat = self._tensors, self._flat
        views = list(flat.split(list(task.counts)))
        ways: dict[str, Side] = {
            OURS: lambda: pack(tensors, out=flat),
            "foreach_copy": lambda: torch._foreach_copy_(views, tensors),
            "cat": lambda: torch.cat(tensors, out=flat),
        }
        return ways | {who: lambda twin=twin: twin.pack(tensors, out=flat) for who, twin in twins(task.device).items()}

    def reset(self, salt: int) -> None:
        self._wanted = whole_numbers(len(self._flat), salt, self._flat.device)
        torch._foreach_copy_(self._tensors, list(self._wanted.split([len(tensor) for tensor in self._tensors])))
        self._flat.fill_(POISON)

    def wrong(self) -> int:
        return differing(self._flat, self._wanted)


CASE = case_of(
    Packing,
    name="pack",
    summary="mgpu_core.kernels.pack: many float32 tensors into a flat one",
    peers=("foreach_copy", "cat"),
    traffic="size read + size written",
    twinned=True,
    many=True,
    bounds=(
        full_speed(),
        *(at_least(1, peer, device="cuda", tensors=10000, clock="device") for peer in ("foreach_copy", "cat")),
    ),
)
