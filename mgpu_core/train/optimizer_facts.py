"""What the fused update reads off the user's optimizer: whether the kernels serve it, and its groups' numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mgpu_core import kernels, optim
from mgpu_core.device.dtypes import FLOATING, has_gradients
from mgpu_core.look import Look
from mgpu_core.train.fused_device import NO_GROUP

__all__ = [
    "OwnHook",
    "group_table",
    "groups_of",
    "has_own_step",
    "has_plain_settings",
    "is_sgd",
    "optimizer_look",
    "settings_of",
    "step_hooks",
    "why_not_fused",
]

_SGD_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
_ADAM_NUMBERS = ("lr", "eps", "weight_decay", "maximize")
_ADAM_SETTINGS = (*_ADAM_NUMBERS, "betas")
_NUMBERS = (float, int, bool)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SGD = (SGD, optim.SGD)


def is_sgd(optimizer: Optimizer) -> bool:
    """Whether it is SGD; what the kernels serve else is Adam or AdamW."""
    return type(optimizer) in _SGD


def why_not_fused(optimizer: Optimizer, parameters: Sequence[torch.Tensor], loose: Sequence[int]) -> str | None:
    """Why torch must update; ``None`` where the fused kernels can.  Of another class than theirs: an empty string."""
    if type(optimizer) not in (*_SGD, Adam, AdamW, optim.Adam, optim.AdamW):
        return ""
    if loose:
        return "some gradients are sparse"
    if has_own_step(optimizer):
        return "its step() was replaced"
    if any(step_hooks(optimizer)):
        return "the optimizer has step hooks"
    if any(each.dtype not in FLOATING for each in parameters if has_gradients(each.dtype)):
        return "some parameters are not float16, bfloat16, float32 or float64"
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        return "it is differentiable"
    for name in ("amsgrad", "decoupled_weight_decay"):
        if len({bool(group.get(name)) for group in groups}) > 1:
            return f"its groups differ in {name}"
    return None


def step_hooks(optimizer: Optimizer) -> tuple[int, ...]:
    """How many hooks a step of the optimizer would call: its own, before and after, and those of all optimizers."""
    before, after = (getattr(optimizer, name, {}) for name in _HOOKS)  # a wrapper may lack what torch's class makes
    return (
        sum(type(hook) is not OwnHook for hook in before.values()),
        len(after),
        len(_global_optimizer_pre_hooks),
        len(_global_optimizer_post_hooks),
    )


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` is the user's; schedulers wrap it to know that it was called."""
    step = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


class OwnHook:
    """What an update itself has hooked to the optimizer's step; known by its class."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        self._call()


def settings_of(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """Per group its hyper-parameters as plain numbers; of SGD the second is the momentum."""
    names = _SGD_NUMBERS if is_sgd(optimizer) else _ADAM_SETTINGS
    return [_plain_all([group[name] for name in names]) for group in optimizer.param_groups]


def has_plain_settings(optimizer: Optimizer) -> bool:
    """Whether no hyper-parameter can change in place, as a tensor or a list does."""
    return all(
        type(each) in (*_NUMBERS, str, type(None))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
        for each in (value if type(value) is tuple else (value,))
    )


def optimizer_look(optimizer: Optimizer) -> Look:
    """Over as soon as groups, hyper-parameters, entries of the state or hooks of the optimizer's steps are others."""
    groups = optimizer.param_groups
    hooks = [getattr(optimizer, name) for name in _HOOKS]
    states = [each for each in optimizer.state.values() if isinstance(each, dict)]  # the user may keep something else
    return Look(
        [groups, *groups, *(group["params"] for group in groups), optimizer.state, *states, *hooks]
        + [_global_optimizer_pre_hooks, _global_optimizer_post_hooks, vars(optimizer)],
        [(optimizer, name) for name in ("param_groups", "state", *_HOOKS)],
    )


def group_table(optimizer: Optimizer) -> torch.Tensor:
    """The same as the kernels read them."""
    groups = optimizer.param_groups
    if is_sgd(optimizer):
        return kernels.sgd_groups(*map(_sgd_numbers, groups))
    return kernels.adam_groups(*map(_adam_numbers, groups))


def groups_of(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> list[int]:
    """Per parameter the number of its group; -1 for one that the optimizer does not have."""
    numbers = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    return [numbers.get(id(each), NO_GROUP) for each in parameters]


def _sgd_numbers(group: dict[str, Any]) -> dict[str, float]:
    return {name: float(group[name]) for name in _SGD_NUMBERS}


def _adam_numbers(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {name: float(group[name]) for name in _ADAM_NUMBERS} | {"beta1": float(beta1), "beta2": float(beta2)}


def _plain_all(values: list[Any]) -> tuple[Any, ...]:
    return tuple([value if type(value) in _NUMBERS else _plain(value) for value in values])


def _plain(value: Any) -> Any:
    """A tensor's number, because schedulers write into the tensor; on a GPU somebody waits for it."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return _plain_all(list(value)) if isinstance(value, tuple | list) else value
