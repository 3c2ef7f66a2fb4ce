"""The arguments of a step, its module and devices at the border: all is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.devices.devices import as_devices, local_devices
from mgpu_core.devices.transfer import module_to
from mgpu_core.pipeline.module import Pipeline
from mgpu_core.pipeline.place import is_placed
from mgpu_core.ranks.team import Team
from mgpu_core.step.forward_backward import why_not_gathered
from mgpu_core.step.losses import reduction_of
from mgpu_core.step.optimizer_step import why_not_in_shards
from mgpu_core.step.options import Options, nonfinite_is_error
from mgpu_core.step.pipeline_passes import why_not_over_pipeline
from mgpu_core.step.ranks import why_not_cut
from mgpu_core.support.warnings import warn_user
from mgpu_core.tensor_parallel.module import TensorParallel
from mgpu_core.trees.module_tree import named_parameters_of, parameters_of
from mgpu_core.trees.moves import is_spread, move_buffers

__all__ = ["check_device", "check_module", "check_optimizer", "checked_options", "warn_of_options"]


def checked_options(
    net: Module, loss_fn: Callable[..., Any] | None, optimizer: Optimizer, device_ids: Any, **settings: Any
) -> Options:
    """Return the arguments of a step, which fit together.

    Raises:
        TypeError, ValueError: arguments that cannot be, or do not fit together.
    """
    check_module(net)
    check_optimizer(optimizer, net)
    _check_loss(loss_fn)
    team = _team_of(net, device_ids)
    settings["reduction"] = reduction_of(loss_fn, settings["reduction"])
    settings["error_if_nonfinite"] = nonfinite_is_error(settings["error_if_nonfinite"], team)
    options = Options(module=net, loss_fn=loss_fn, optimizer=optimizer, team=team, **settings)
    for why_not in (why_not_gathered, why_not_over_pipeline, why_not_cut, why_not_in_shards):
        if reason := why_not(options):
            raise ValueError(reason)
    return options


def warn_of_options(options: Options) -> None:
    """Warn of arguments that have no effect, or are slow."""
    devices = options.team.devices
    if options.algorithm != "auto" and len(set(devices)) == 1:
        warn_user(f'algorithm="{options.algorithm}" has no effect: all ranks are on {devices[0]}, so none is needed')
    if options.amp_dtype is torch.float16 and any(device.type == "cpu" for device in devices):
        warn_user("float16 is slow on CPUs, most of which emulate it: use bfloat16")


def check_module(net: Module) -> None:
    """Raise TypeError unless it is a bare module."""
    if not isinstance(net, Module):
        raise TypeError(f"net must be a torch.nn.Module, not {type(net).__name__}")
    if isinstance(net, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"net is a {type(net).__name__}: pass what it wraps, `net.module`")


def check_optimizer(optimizer: Any, net: Module) -> None:
    """Raise unless it is an optimizer over parameters of the module."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS calls the loss several times in a step, through a closure: TrainStep computes it once")
    known = {id(parameter) for _, parameter in named_parameters_of(net)}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"parameter {index} of the optimizer's group {number}, of shape {tuple(parameter.shape)}, is not "
                    "one of net.parameters(): make the optimizer from the module that TrainStep gets"
                )


def _check_loss(loss_fn: Any) -> None:
    """Check the loss function of a step.

    Raises:
        TypeError: it cannot be called.
        ValueError: a module with parameters that require grad, which no optimizer would update.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, or None where the module returns the loss, not {loss_fn!r}")
    if isinstance(loss_fn, type) and issubclass(loss_fn, Module):
        raise TypeError(f"loss_fn must be an instance, {loss_fn.__name__}(), and not the class")
    if isinstance(loss_fn, Module) and any(parameter.requires_grad for parameter in parameters_of(loss_fn)):
        raise ValueError(
            f"{type(loss_fn).__name__} has parameters of its own: make it part of the module, which then returns the "
            "loss, and pass loss_fn=None"
        )


def _team_of(net: Module, device_ids: Any) -> Team:
    """Return the team that ``device_ids`` means; an empty list is the device of the module.

    Of a pipeline it is the last device, and of a TensorParallel the first, where their losses are.

    Raises:
        ValueError: not the devices of a Pipeline or a TensorParallel.
    """
    if isinstance(net, Pipeline):
        if device_ids is not None and (_is_nested(device_ids) or list(as_devices(device_ids)) != net.device_ids):
            raise ValueError(
                f"device_ids must be the pipeline's own devices, {list(map(str, net.device_ids))}, or left out: a step "
                "makes no copies of a Pipeline; for more devices make a Pipeline over all of them"
            )
        return Team.of(net.device_ids[-1:])
    if isinstance(net, TensorParallel):
        if device_ids is not None and list(as_devices(device_ids)) != net.device_ids:
            raise ValueError(f"device_ids must be those of the TensorParallel, {list(map(str, net.device_ids))}")
        return Team.of(net.device_ids[:1])
    if device_ids is None:
        device_ids = local_devices()
    if not isinstance(device_ids, str | int | torch.device) and not len(device_ids):
        device_ids = [next((each.device for each in parameters_of(net)), torch.device("cpu"))]
    return Team.of(as_devices(device_ids))


def _is_nested(device_ids: Any) -> bool:
    return isinstance(device_ids, list | tuple) and any(isinstance(each, list | tuple) for each in device_ids)


def check_device(net: Module, team: Team, shard: str | None) -> None:
    """Move the module to the only device; of several devices it must be on the first one, otherwise RuntimeError.

    A pipeline or a TensorParallel stays as it is, and looks after its tensors itself.  Parameters that will be in
    shards may lie anywhere; the buffers are moved.
    """
    if isinstance(net, Pipeline | TensorParallel):
        return
    if shard == "parameters" and not is_placed(net):
        move_buffers(net, team.devices[0])
        return
    if is_spread(net) or is_placed(net):
        raise RuntimeError(
            "net's parts are on several devices, by place() or a Pipeline: pass the Pipeline to the step"
        )
    if len(team) == 1:
        module_to(net, team.devices[0])
    for name, tensor in [*named_parameters_of(net), *net.named_buffers()]:
        if tensor.device != team.devices[0]:
            raise RuntimeError(
                f"net must have its parameters and buffers on {team.devices[0]} (device_ids[0]), but {name} is on "
                f"{tensor.device}"
            )
