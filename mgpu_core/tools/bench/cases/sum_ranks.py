"""The tensors of several ranks, all on one device, added up: the inner part of a reduction."""

from collections.abc import Mapping

import torch

from mgpu_core.kernels import sum_ranks
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

RANKS = 4


class Summing:
    """Four tensors of whole numbers and where their sum goes."""

    turns = 1

    def __init__(self, task: Task) -> None:
        self.nbytes = 4 * task.count * (RANKS + 1)
        self._tensors = [torch.empty(task.count, device=task.device) for _ in range(RANKS)]
        self._out = torch.empty(task.count, device=task.device)
        self.sides = self._ways(task)

    def _ways(self, task: Task) -> Mapping[str, Side]:
        tensors, out = self._tensors, self._out

        def add() -> None:
            torch.add(tensors[0], tensors[1], out=out)
            for tensor in tensors[2:]:
                out.add_(tensor)

        ways: dict[str, Side] = {OURS: lambda: sum_ranks(tensors, out=out), "add": add}
        return ways | {
            who: lambda twin=twin: twin.sum_ranks(tensors, out=out) for who, twin in twins(task.device).items()
        }

    def reset(self, salt: int) -> None:
        for rank, tensor in enumerate(self._tensors):
            tensor.copy_(whole_numbers(len(tensor), salt + 5 * rank, tensor.device))
        self._out.fill_(POISON)

    def wrong(self) -> int:
        return differing(self._out, torch.stack(self._tensors).sum(0))


CASE = case_of(
    Summing,
    name="sum_ranks",
    summary=f"mgpu_core.kernels.sum_ranks: {RANKS} float32 tensors of one device into another",
    peers=("add",),
    traffic=f"{RANKS} x size read + size written",
    twinned=True,
    pieces=False,
    bounds=(full_speed(),),
)
