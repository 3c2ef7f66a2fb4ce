"""AdamW over a flat buffer, against torch's three ways on the same memory."""

from functools import partial

import torch

from mgpu_core.kernels import adam_groups, adamw, reference
from mgpu_core.tools.bench.case import at_least
from mgpu_core.tools.bench.kernel_case import FULL, case_of, full_speed
from mgpu_core.tools.bench.optimizer_case import Flat, Optimizer, Optimizing

RATE, DECAY = 0.125, 0.01


def step(flat: Flat) -> None:
    """Ours."""
    first, second = flat.states
    adamw(flat.parameters, flat.gradients, first, second, flat.segments, flat.groups)


def truth(flat: Flat) -> None:
    """Plain torch; not amsgrad, the weight decay apart from the gradient."""
    tables, (first, second) = (flat.segments, flat.groups), flat.states
    reference.adam(flat.parameters, flat.gradients, first, second, None, *tables, True, None, None)


ADAMW = Optimizer(
    states=2,
    untouched=0.0,
    groups=adam_groups({"lr": RATE, "weight_decay": DECAY}),
    step=step,
    truth=truth,
    torchs=partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY),
)
CASE = case_of(
    partial(Optimizing, ADAMW),
    name="adamw",
    summary="mgpu_core.kernels.adamw: a step over a flat float32 buffer",
    peers=("fused", "foreach", "loop"),
    traffic="4 x size read + 3 x size written",
    bounds=(full_speed(), at_least(1, "fused", device="cuda", size=FULL, clock="device")),
)
