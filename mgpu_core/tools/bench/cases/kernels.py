"""The kernels, a row each: the tensors of a problem, the ways to do its work on them, and their result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.utils import get_total_norm

from mgpu_core import kernels
from mgpu_core.kernels import FlatNorm, reference
from mgpu_core.tools.bench.case import at_least
from mgpu_core.tools.bench.kernel_case import FULL, POISON, Side, Task, case_of, differing, twin_sides, whole_numbers
from mgpu_core.tools.bench.optimizer_case import Flat, Optimizer, Optimizing
from mgpu_core.tools.bench.timing import OURS

RANKS, SCALE = 4, 0.125
RATE, MOMENTUM, DECAY = 0.125, 0.5, 0.01


@dataclass
class Moving:
    """Inputs of whole numbers, from which every side makes the same outputs; see `Problem`.

    Attributes:
        wanted: from the inputs to all elements of the outputs.
        tolerance: relative, of those.
    """

    nbytes: int
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    sides: Mapping[str, Side]
    wanted: Callable[[], torch.Tensor]
    tolerance: float = 0.0
    turns: int = 1

    def reset(self, salt: int) -> None:
        for index, tensor in enumerate(self.inputs):
            tensor.copy_(whole_numbers(len(tensor), salt + 5 * index, tensor.device))
        for output in self.outputs:
            output.fill_(POISON)

    def wrong(self) -> int:
        values = torch.cat([output.reshape(-1) for output in self.outputs])
        return differing(values.float(), self.wanted().float(), self.tolerance)


def _empty(task: Task, *counts: int) -> list[torch.Tensor]:
    return [torch.empty(count, device=task.device) for count in counts]


def _packing(task: Task) -> Moving:
    tensors, (flat,) = _empty(task, *task.counts), _empty(task, task.count)
    views = list(flat.split(list(task.counts)))
    sides: dict[str, Side] = {
        OURS: lambda: kernels.pack(tensors, out=flat),
        "foreach_copy": lambda: torch._foreach_copy_(views, tensors),
        "cat": lambda: torch.cat(tensors, out=flat),
        **twin_sides(task, lambda twin: twin.pack(tensors, out=flat)),
    }
    return Moving(8 * task.count, tensors, [flat], sides, lambda: torch.cat(tensors))


def _unpacking(task: Task) -> Moving:
    tensors, (flat,) = _empty(task, *task.counts), _empty(task, task.count)
    views = list(flat.split(list(task.counts)))
    sides: dict[str, Side] = {
        OURS: lambda: kernels.unpack(flat, tensors),
        "foreach_copy": lambda: torch._foreach_copy_(tensors, views),
    }
    return Moving(8 * task.count, [flat], tensors, sides, lambda: flat)


def _summing(task: Task) -> Moving:
    *tensors, out = _empty(task, *[task.count] * (RANKS + 1))

    def add() -> None:
        torch.add(tensors[0], tensors[1], out=out)
        for tensor in tensors[2:]:
            out.add_(tensor)

    sides: dict[str, Side] = {OURS: lambda: kernels.sum_ranks(tensors, out=out), "add": add}
    sides |= twin_sides(task, lambda twin: twin.sum_ranks(tensors, out=out))
    return Moving(4 * task.count * (RANKS + 1), tensors, [out], sides, lambda: torch.stack(tensors).sum(0))


def _casting(task: Task) -> Moving:
    """Whole numbers up to 12, of which an eighth is exact in bfloat16."""
    (tensor,) = _empty(task, task.count)
    out = torch.empty_like(tensor, dtype=torch.bfloat16)
    sides: dict[str, Side] = {
        OURS: lambda: kernels.scale_cast(tensor, SCALE, torch.bfloat16, out=out),
        "mul_out": lambda: torch.mul(tensor, SCALE, out=out),
        "mul_to": lambda: out.copy_((tensor * SCALE).to(torch.bfloat16)),
    }
    return Moving(6 * task.count, [tensor], [out], sides, lambda: tensor / 8)


def _norming(task: Task) -> Moving:
    """Compare with the exact sum of squares, in float64; torch adds them up in float32, hence the tolerance."""
    (flat,) = _empty(task, task.count)
    tensors = list(flat.split(list(task.counts)))
    norm, outputs = FlatNorm(tensors), [torch.empty((), device=task.device)]

    def keep(way: Callable[[], torch.Tensor]) -> None:
        outputs[0] = way()  # ours lies in the same memory at every call

    ways: dict[str, Callable[[], torch.Tensor]] = {
        OURS: norm.compute,  # as a step that clips does: of tensors that were looked at once
        "total_norm": lambda: get_total_norm(tensors),
        "foreach_norm": lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))),
    }
    sides = {who: partial(keep, way) for who, way in ways.items()}
    return Moving(4 * task.count, [flat], outputs, sides, lambda: flat.double().square().sum().sqrt(), tolerance=1e-4)


def _sgd_truth(flat: Flat) -> None:
    reference.sgd(flat.parameters, flat.gradients, flat.states[0], flat.segments, flat.groups, None, None)


def _adamw_truth(flat: Flat) -> None:
    """Not amsgrad, the weight decay apart from the gradient."""
    first, second = flat.states
    reference.adam(flat.parameters, flat.gradients, first, second, None, flat.segments, flat.groups, True, None, None)


SGD = Optimizer(
    states=1,
    untouched=POISON,  # the first step does not read it
    groups=kernels.sgd_groups({"lr": RATE, "momentum": MOMENTUM}),
    step=lambda flat: kernels.sgd(*flat.arguments),
    truth=_sgd_truth,
    torchs=partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
    twin=lambda twin, flat: twin.sgd(*flat.arguments),
)
ADAMW = Optimizer(
    states=2,
    untouched=0.0,
    groups=kernels.adam_groups({"lr": RATE, "weight_decay": DECAY}),
    step=lambda flat: kernels.adamw(*flat.arguments),
    truth=_adamw_truth,
    torchs=partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY),
)

_TORCHS = ("fused", "foreach", "loop")
_FASTEST = (at_least(1, "fused", device="cuda", size=FULL, clock="device"),)
_MANY = tuple(at_least(1, peer, device="cuda", tensors=10000, clock="device") for peer in ("foreach_copy", "cat"))
# fmt: off
_ROWS = (
    case_of(partial(Optimizing, SGD), "sgd", "a step with momentum over a flat float32 buffer", _TORCHS,
            "3 x size read + 2 x size written", twinned=True),
    case_of(partial(Optimizing, ADAMW), "adamw", "a step over a flat float32 buffer", _TORCHS,
            "4 x size read + 3 x size written", bounds=_FASTEST),
    case_of(_packing, "pack", "many float32 tensors into a flat one", ("foreach_copy", "cat"),
            "size read + size written", twinned=True, many=True, bounds=_MANY),
    case_of(_unpacking, "unpack", "a flat float32 tensor into many", ("foreach_copy",),
            "size read + size written", many=True),
    case_of(_summing, "sum_ranks", f"{RANKS} float32 tensors of one device into another", ("add",),
            f"{RANKS} x size read + size written", twinned=True, pieces=False),
    case_of(_casting, "scale_cast", "float32 x 1/8 to bfloat16", ("mul_out", "mul_to"),
            "size read + size / 2 written", pieces=False),
    case_of(_norming, "l2_norm", "one norm of many float32 tensors", ("total_norm", "foreach_norm"),
            "size read", function="FlatNorm"),
)
# fmt: on
CASES = {each.name: each for each in _ROWS}
