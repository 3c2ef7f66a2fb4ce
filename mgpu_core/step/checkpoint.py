"""The state of a step, to resume from on any number of ranks; and a check that all ranks hold the same bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.devices.devices import accelerators
from mgpu_core.devices.plug_ins import numbers_of, put_numbers_back
from mgpu_core.devices.tensor_checks import bytes_of, memory_of
from mgpu_core.devices.transfer import to_device
from mgpu_core.optim.flat_buffers import compact
from mgpu_core.step.replicas import Replicas

__all__ = ["check_groups", "compact_copy", "first_difference", "load_state", "state_of"]

FORMAT = "mgpu_core.TrainStep 1"


def state_of(net: Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return compact copies of everything: later steps do not change them, and files hold nothing else."""
    return {
        "format": FORMAT,
        "module": compact_copy(net.state_dict()),
        "optimizer": compact_copy(optimizer.state_dict()),
        "random": {"cpu": torch.get_rng_state(), "accelerators": list(numbers_of(accelerators()).values())},
    }


def load_state(state: Any, net: Module, optimizer: Optimizer) -> None:
    """Load a state.  Everything is validated before anything is changed.

    Raises:
        ValueError: not a state of this kind, or one of another module or optimizer.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(
            f"wanted a state with the mark {FORMAT!r}, as TrainStep.state_dict() makes it; a net's own is loaded by "
            "net.load_state_dict()"
        )
    if missing := {"module", "optimizer", "random", "steps", "loss_scale", "shares"} - state.keys():
        raise ValueError(f"the state has no {min(missing)}")
    _check_fits(state["module"], net.state_dict())
    groups = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if groups != wanted:
        raise ValueError(f"the state's optimizer has groups of {groups} parameters, this one of {wanted}")
    check_groups(state["optimizer"], optimizer)
    random = state["random"]["cpu"].cpu()
    torch.Generator().set_state(random)  # it is one
    net.load_state_dict(state["module"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    torch.set_rng_state(random)
    put_numbers_back(dict(zip(accelerators(), state["random"]["accelerators"], strict=False)))


def check_groups(state: dict[str, Any], optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer's state lacks numbers that this one needs in each step; it may have more."""
    for group in state["param_groups"]:
        # Torch adds `differentiable` to the defaults of an optimizer, not to its groups, when a state is loaded.
        if missing := optimizer.defaults.keys() - group.keys() - {"differentiable"}:
            raise ValueError(
                f"the state is of another optimizer than {type(optimizer).__name__}: its groups have no {min(missing)}"
            )


def _check_fits(state: dict[str, Any], module_state: dict[str, Any]) -> None:
    if missing := module_state.keys() - state.keys():
        raise ValueError(f"the state has no {min(missing)}, which the module has")
    if more := state.keys() - module_state.keys():
        raise ValueError(f"the state has {min(more)}, which the module does not have")
    for name, value in module_state.items():
        if torch.is_tensor(value) and value.shape != state[name].shape:
            raise ValueError(
                f"{name} is {tuple(state[name].shape)} in the state and {tuple(value.shape)} in the module"
            )


def compact_copy(value: Any, copies: dict[Any, torch.Tensor] | None = None) -> Any:
    """Return a copy of a nest whose tensors have memory of their own: ``torch.save`` writes all that a view is of.

    Args:
        copies: those made so far, by memory: weights that are tied stay one.
    """
    copies = {} if copies is None else copies
    if isinstance(value, torch.Tensor):
        key = _memory_key(value)
        if key not in copies:
            copies[key] = compact(value)
        return copies[key]
    if isinstance(value, dict):
        copied = copy.copy(value)  # with the version numbers that a module's state carries
        copied.update({name: compact_copy(each, copies) for name, each in value.items()})
        return copied
    return [compact_copy(each, copies) for each in value] if isinstance(value, list) else copy.deepcopy(value)


def _memory_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that are the same memory seen in the same way."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
        return object()  # no memory that can be asked for
    return tensor.device, tensor.is_conj(), tensor.is_neg(), *zip(*memory_of([tensor]), strict=True)


def first_difference(replicas: Replicas) -> tuple[str, int] | None:
    """Return the first parameter that is not the same on all ranks, and the first rank where it is not."""
    for i in replicas.copied:
        name = replicas.names[i]
        wanted = bytes_of(replicas.own[i].detach())  # NaN equals NaN, and -0 does not equal 0
        for rank in replicas.team.ranks:
            if not torch.equal(to_device(bytes_of(replicas.parameters[rank][i].detach()), wanted.device), wanted):
                return name, rank
    return None
