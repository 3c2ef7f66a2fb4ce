"""``MultiGPUStrategy`` for Lightning's Trainer: one process, several ranks, and the results of one device.

Either calls of ``self(...)`` run over the ranks and everything else runs once, on all rows; or each rank runs
``training_step`` on its own rows, inside a :class:`mgpu_core.TrainStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from mgpu_core.data_parallel import DataParallel
from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.parallel.scatter_inputs.cut import Arguments
from mgpu_core.step.train_step import TrainStep
from mgpu_core.step.window import weighted_mean
from mgpu_core.support.extras import require
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user

__all__ = ["MultiGPUStrategy"]

_Strategy: Any = require("lightning.pytorch.strategies", "MultiGPUStrategy").SingleDeviceStrategy
_LightningModule: Any = require("lightning.pytorch", "MultiGPUStrategy").LightningModule
_is_overridden = require("lightning.pytorch.utilities.model_helpers", "MultiGPUStrategy").is_overridden

_SKIPPED_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
)
"""Hooks around backward and before the update, which a TrainStep makes in one call."""


class MultiGPUStrategy(_Strategy):  # type: ignore[misc]
    """Train, validate, test and predict over several ranks: ``Trainer(strategy=MultiGPUStrategy(["cpu"] * 4))``.

    The LightningModule's ``self(...)`` runs over the ranks, which each get a part of the rows, and its outputs come
    back together.  The rest of a step runs once, on all rows: losses, ``self.log``, metrics, hooks and optimizers are
    those of one device.  A number that is logged in the forward is logged once, as the mean over all rows.  State dicts
    have the keys of one device.

    Args:
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`; ``None``: the Trainer's devices.
        modules: names of submodules whose calls run over the ranks instead: ``["generator", "critic"]``.
        train_step: run ``training_step`` on each rank's rows, and backward, clipping and update in a
            :class:`mgpu_core.TrainStep`.  The loss must be a mean over rows.  ``self.log`` logs the mean over all
            rows, once; of the step's outputs only the loss remains, and gradients are not shown.

    Raises:
        TypeError, ValueError: devices that do not exist.  At the start of training with ``train_step=True``: what a
            TrainStep cannot do, by name.
    """

    def __init__(
        self,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        modules: Sequence[str] | None = None,
        train_step: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(modules, str):
            raise TypeError(f"modules is a list of names, not {modules!r}")
        # The Trainer puts its own devices here, if there are none.
        self.parallel_devices: list[torch.device] = [] if device_ids is None else list(as_devices(device_ids))
        self._names, self._whole_step = modules or [""], train_step
        self._over_ranks: list[_OverRanks] = []
        self._step: _LightningStep | None = None

    @property
    def root_device(self) -> torch.device:
        """The first rank's device, where batches, the loss and the optimizer's state are."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    def setup(self, trainer: Any) -> None:
        """Make the ranks' wrappers, and the step, of the module that the Trainer has."""
        super().setup(trainer)
        module = self.lightning_module
        self._over_ranks = [_OverRanks(module.get_submodule(name), self.parallel_devices) for name in self._names]
        if self._whole_step and self.optimizers:
            _check_whole_step(trainer, module, self.precision_plugin)
            self._step = _LightningStep(trainer, module, self.optimizers[0], self.parallel_devices)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's training step; with ``train_step=True`` its loss, after the update."""
        if self._step is None:
            return self._run(super().training_step, *args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's validation step."""
        return self._run(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's test step."""
        return self._run(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's predict step."""
        return self._run(super().predict_step, *args, **kwargs)

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _redirected(self._over_ranks):
            result = step(*args, **kwargs)
        if not any(each.was_called for each in self._over_ranks):
            names = [f"self.{name}(...)" if name else "self(...)" for name in self._names]
            warn_user(
                f"{type(self.lightning_module).__name__}.{step.__name__} did not call {' or '.join(names)}, so nothing "
                'ran over the ranks: name the modules that it calls, as in MultiGPUStrategy(..., modules=["net"])'
            )
            self._over_ranks[0].was_called = True  # once is enough
        return result

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward, if no TrainStep has done it."""
        return closure_loss if self._step is not None else super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Update; with ``train_step=True`` that happens in the closure, which calls :meth:`training_step`."""
        if self._step is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._step.is_updating = True
        try:
            return closure()
        finally:
            self._step.is_updating = False

    def teardown(self) -> None:
        """Give the module and the optimizer memory of their own again, and end the threads."""
        if self._step is not None:
            self._step.step.close()
        for ranks in self._over_ranks:
            ranks.wrapper.close()
        self._step, self._over_ranks = None, []
        super().teardown()


class _OverRanks:
    """A module whose own ``forward`` runs over the ranks while it is redirected; its hooks run once, on all rows."""

    def __init__(self, module: Module, devices: Sequence[torch.device]) -> None:
        if "forward" in vars(module):
            name = type(module).__name__
            raise TypeError(f"{name} has a forward of its own, as torch.compile sets it: compile modules inside of it")
        self.module, self.was_called = module, False
        self.forward = _Forward(module)
        self.wrapper = DataParallel(self.forward, devices)


class _Forward(Module):
    """Calls a module's ``forward``, without its hooks; what the ranks log in it is logged once, for all rows."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.logged: dict[str, list[_Logged]] = {}  # by name, from all ranks, which share this dict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        if not isinstance(module, _LightningModule):
            return module.forward(*args, **kwargs)
        rows = float(Arguments({"inputs": (args, kwargs)}).rows(0) or 1)

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            _check_logged(name, value, options, "in a forward over ranks")
            self.logged.setdefault(name, []).append(_Logged(value, rows, args, options))

        vars(module)["log"] = log
        try:
            return module.forward(*args, **kwargs)
        finally:
            vars(module).pop("log", None)

    def log_once(self) -> None:
        """Log the mean over all rows of each number that the ranks logged."""
        module: Any = self.module
        calls = dict(self.logged)
        self.logged.clear()
        for name, logged in calls.items():
            device = next((each.value.device for each in logged if isinstance(each.value, torch.Tensor)), None)
            numbers = [1.0 * torch.as_tensor(each.value).detach() for each in logged]
            on = numbers[0].device if device is None else device
            rows = [each.rows for each in logged]
            mean = weighted_mean(numbers, rows, on)
            sizes = [each.options["batch_size"] for each in logged if each.options.get("batch_size") is not None]
            options = logged[0].options | {"batch_size": sum(sizes) if sizes else int(sum(rows))}
            module.log(name, mean, *logged[0].args, **options)


class _Logged(NamedTuple):
    """A call of ``self.log`` by one rank."""

    value: Any
    rows: float
    args: tuple[Any, ...]
    options: dict[str, Any]


def _check_logged(name: str, value: Any, options: Mapping[str, Any], where: str) -> None:
    """Raise unless a number is logged as a mean over rows, which ranks can be joined to."""
    if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
        raise ValueError(f"self.log({name!r}, reduce_fx=...): {where} it is the mean over rows")
    if not isinstance(value, int | float | torch.Tensor):
        raise TypeError(f"self.log({name!r}, ...) logs numbers {where}, not {type(value).__name__}")


@contextmanager
def _redirected(modules: Sequence[_OverRanks]) -> Iterator[None]:
    """Let the first of these modules that is called run over the ranks; what it calls there runs as it is."""

    def redirect() -> None:
        for wrapped in modules:
            vars(wrapped.module)["forward"] = partial(run, wrapped)

    def put_back() -> None:
        for wrapped in modules:
            vars(wrapped.module).pop("forward", None)

    def run(called: _OverRanks, *args: Any, **kwargs: Any) -> Any:
        called.was_called = True
        put_back()
        try:
            outputs = called.wrapper(*args, **kwargs)
        finally:
            redirect()
        called.forward.log_once()
        return outputs

    redirect()
    try:
        yield
    finally:
        put_back()


class _LightningStep:
    """A TrainStep whose ranks run the training step; it updates in the last call of a window of accumulation."""

    def __init__(self, trainer: Any, module: Any, optimizer: Any, devices: Sequence[torch.device]) -> None:
        self._trainer, self._ranks, self._device, self.is_updating = trainer, _RankStep(module), devices[0], False
        self.step = TrainStep(self._ranks, None, optimizer, devices, reduction="sum")
        self.step.clip_norm = trainer.gradient_clip_val or None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Make a step on a batch, log the numbers, and return the loss of all rows."""
        rows = torch.zeros(Arguments({"batch": (args, kwargs)}).rows(0) or 1, device=self._device)
        calls = self._trainer.accumulate_grad_batches
        with NULL_CONTEXT if self.is_updating else self.step.no_sync():
            loss, numbers = self.step(rows, len(rows), calls, *args, aux=True, **kwargs)
        self._ranks.log_once(numbers)
        return loss * calls  # type: ignore[no-any-return]


class _RankStep(Module):
    """The training step of one rank: its part of the loss, and of the numbers that it logs."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.calls: dict[str, list[Any]] = {}  # of self.log by name, from all ranks

    def forward(
        self, tensor: torch.Tensor, rows: int, calls: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return what this rank adds to both.

        Args:
            tensor: one of this rank's rows, of which a batch has ``rows``.
            calls: per update, by which the Trainer divides a loss.
            args, kwargs: of the training step.
        """
        numbers: dict[str, Any] = {}
        part = len(tensor) / rows

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            _check_logged(name, value, options, "with train_step=True")
            numbers[name] = value * part
            self.calls.setdefault(name, []).append((args, options))

        module: Any = self.module
        vars(module)["log"] = log
        try:
            result = module.training_step(*args, **kwargs)
        finally:
            del vars(module)["log"]
        loss = result["loss"] if isinstance(result, Mapping) else result
        if loss is None:
            raise TypeError(
                "training_step returned None: with train_step=True a batch cannot be skipped, because the other ranks "
                "have rows of it, too"
            )
        return loss * (part / calls), numbers

    def log_once(self, numbers: Mapping[str, torch.Tensor]) -> None:
        """Log the numbers of all ranks together, as the ranks asked for it."""
        module: Any = self.module
        for name, value in numbers.items():
            calls = self.calls.pop(name)
            args, options = calls[0]
            sizes = [each["batch_size"] for _, each in calls if each.get("batch_size") is not None]
            module.log(name, value, *args, **options | {"batch_size": sum(sizes) or None})


def _check_whole_step(trainer: Any, module: Any, precision: Any) -> None:
    """Raise ValueError, naming what a TrainStep cannot do in the Trainer."""
    refused = [
        f"{type(owner).__name__}.{hook}"
        for owner in (module, *trainer.callbacks)
        for hook in _SKIPPED_HOOKS
        if hasattr(owner, hook) and _is_overridden(hook, owner)
    ]
    if not module.automatic_optimization:
        refused.append("automatic_optimization = False")
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        refused.append(f'gradient_clip_algorithm="{trainer.gradient_clip_algorithm.value}"')
    if getattr(precision, "scaler", None) is not None:
        refused.append(f'precision="{trainer.precision}"')
    if refused:
        raise ValueError(f"MultiGPUStrategy(train_step=True) cannot have {', '.join(refused)}: leave train_step out")
