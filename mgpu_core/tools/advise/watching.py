"""Which net does a script call for inference, or in training, and with what?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mgpu_core.data_parallel import DataParallel
from mgpu_core.devices.devices import DeviceLike
from mgpu_core.inference.predictor import Predictor
from mgpu_core.inference.requests import Call
from mgpu_core.tools.advise.script import dim_of, without_wrappers

__all__ = ["Watched", "Watch", "watching"]


@dataclass(slots=True)
class Watched:
    """A net that was called.

    Attributes:
        call: the arguments of the first call.
        count: of the calls.
    """

    net: Module
    call: Call
    count: int = 0

    @property
    def dim(self) -> int:
        """The dimension of the rows."""
        return dim_of(self.net)

    @property
    def devices(self) -> list[DeviceLike] | None:
        """The device of each rank that its calls ran on; ``None`` without a wrapper over several devices."""
        return list(getattr(self.net, "device_ids", None) or []) or None

    @property
    def bare_net(self) -> Module:
        """The net without the wrappers that use several devices."""
        net: Module = without_wrappers(self.net)
        return net


@dataclass(slots=True)
class Watch:
    """The nets that were called for inference, or in training, by their identity."""

    training: bool = False
    _seen: dict[int, Watched] = field(default_factory=dict)
    _optimizers: dict[int, Optimizer] = field(default_factory=dict)
    _outermost: tuple[int, int] | None = None  # thread and module of the call that is being made

    def best(self) -> Watched | None:
        """Return the net that was called most often; of equals the first."""
        return max(self._seen.values(), key=lambda watched: watched.count, default=None)

    def optimizer_of(self, net: Module) -> Optimizer | None:
        """Return the first optimizer that has made a step and holds parameters of the net."""
        wanted = {id(parameter) for parameter in net.parameters()}
        for optimizer in self._optimizers.values():
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                return optimizer
        return None

    def note_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Keep an optimizer that makes a step."""
        self._optimizers[id(optimizer)] = optimizer

    def note(self, net: Module, call: Call) -> None:
        """Count one call."""
        self._seen.setdefault(id(net), Watched(net, call)).count += 1

    def begin(self, module: Module, _args: Any) -> None:
        """Before every forward: remember the outermost module, unless a predictor calls its copy."""
        thread = threading.current_thread()
        if self._outermost is None and not thread.name.startswith("mgpu predictor"):
            self._outermost = threading.get_ident(), id(module)

    def end(self, module: Module, args: tuple[Any, ...], *more: Any) -> None:
        """After every forward: note the outermost one, if it was of the kind that is wanted and has not failed.

        Args:
            more: the keyword arguments and the outputs; after an error torch passes ``None`` alone.
        """
        if self._outermost != (threading.get_ident(), id(module)):
            return
        self._outermost = None
        if getattr(module, "_is_replica", False):  # of a wrapper that was called by its forward
            return
        is_training = module.training and torch.is_grad_enabled()
        if more[-1] is not None and is_training == self.training and next(module.parameters(), None) is not None:
            self.note(module, (args, more[0]))

    def noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of ``DataParallel``, which also notes calls past ``__call__``, where no hook runs."""

        @wraps(forward)
        def noted(model: DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
            is_outermost = self._outermost is None
            outputs = forward(model, *args, **kwargs)
            if is_outermost and (model.training and torch.is_grad_enabled()) == self.training:
                self.note(model, (args, kwargs))
            return outputs

        return noted


@contextmanager
def watching(*, training: bool = False) -> Iterator[Watch]:
    """Note the nets that are called in eval mode or without gradients, in any thread, and those of predictors.

    Args:
        training: note those called in training mode with gradients instead.
    """
    watch, names = Watch(training), () if training else ("__call__", "submit", "asubmit")
    originals = {name: getattr(Predictor, name) for name in names}
    forward = DataParallel.forward
    hooks = [
        torch_module.register_module_forward_pre_hook(watch.begin),
        torch_module.register_module_forward_hook(watch.end, with_kwargs=True, always_call=True),
        register_optimizer_step_pre_hook(watch.note_step),
    ]
    try:
        DataParallel.forward = watch.noting(forward)  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(Predictor, name, _noted(watch, original))
        yield watch
    finally:
        DataParallel.forward = forward  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(Predictor, name, original)
        for hook in hooks:
            hook.remove()


def _noted(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def asked(predictor: Predictor, *inputs: Any, **kwargs: Any) -> Any:
        watch.note(predictor.net, (inputs, {name: each for name, each in kwargs.items() if name != "timeout"}))
        return original(predictor, *inputs, **kwargs)

    return asked
