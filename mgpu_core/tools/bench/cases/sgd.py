"""SGD with momentum over a flat buffer, against torch's three ways on the same memory."""

from functools import partial
from typing import Any

import torch

from mgpu_core.kernels import reference, sgd, sgd_groups
from mgpu_core.tools.bench.kernel_case import POISON, case_of, full_speed
from mgpu_core.tools.bench.optimizer_case import Flat, Optimizer, Optimizing

RATE, MOMENTUM = 0.125, 0.5


def step(flat: Flat) -> None:
    """Ours."""
    sgd(flat.parameters, flat.gradients, flat.states[0], flat.segments, flat.groups)


def twin_step(twin: Any, flat: Flat) -> None:
    """Step with a twin, in another library."""
    twin.sgd(flat.parameters, flat.gradients, flat.states[0], flat.segments, flat.groups)


def truth(flat: Flat) -> None:
    """Plain torch."""
    reference.sgd(flat.parameters, flat.gradients, flat.states[0], flat.segments, flat.groups, None, None)


SGD = Optimizer(
    states=1,
    untouched=POISON,  # the first step does not read it
    groups=sgd_groups({"lr": RATE, "momentum": MOMENTUM}),
    step=step,
    truth=truth,
    torchs=partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
    twin=twin_step,
)
CASE = case_of(
    partial(Optimizing, SGD),
    name="sgd",
    summary="mgpu_core.kernels.sgd: a step with momentum over a flat float32 buffer",
    peers=("fused", "foreach", "loop"),
    traffic="3 x size read + 2 x size written",
    twinned=True,
    bounds=(full_speed(),),
)
