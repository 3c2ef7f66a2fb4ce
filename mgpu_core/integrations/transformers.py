"""``MultiGPUTrainer``: transformers' Trainer over several ranks in one process, with the loss of one device.

The Trainer multiplies the loss of a ``torch.nn.DataParallel`` by the number of GPUs, which is right only for models
that divide by ``num_items_in_batch``, and only if each GPU has rows.  Here each rank gets its own number of items, and
its loss is weighted by it, so both kinds of models give the loss of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.data_parallel import DataParallel
from mgpu_core.devices.devices import DeviceLike, as_devices, local_devices
from mgpu_core.devices.transfer import to_device
from mgpu_core.integrations.generation import Generation
from mgpu_core.parallel.first_calls.labels import count_labels, loss_function_of, shifts_labels
from mgpu_core.support.extras import require
from mgpu_core.trees.nested import tensors_in

__all__ = ["Generation", "MultiGPUMixin", "MultiGPUTrainer", "WeightedLoss"]

_Trainer: Any = require("transformers", "MultiGPUTrainer").Trainer


class WeightedLoss(Module):
    """A transformers model that returns its loss as a sum over labels, and their number, for :class:`TrainStep`.

    A model's own loss is a mean over labels that are not -100.  Ranks have different numbers of those, so that the mean
    of their means is not that of all labels.  With sums and numbers it is::

        step = TrainStep(WeightedLoss(model), None, optimizer, device_ids, reduction="weighted")
        loss = step(**batch)

    A rank whose labels are all -100 adds nothing.  What a model adds to its loss beside the mean over labels, such as
    the auxiliary loss of a router, is weighed by labels, too, which is not what one device does with it.

    Args:
        model: returns a ``loss`` where it gets ``labels``; its parameters, state and ``save_pretrained`` stay its own.
        shifts: the loss leaves out the first label of each row, as that of causal models; ``None``: as its class says.
    """

    def __init__(self, model: Module, *, shifts: bool | None = None) -> None:
        super().__init__()
        self.model = model
        self.shifts = shifts_labels(model) if shifts is None else shifts

    def forward(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of all labels, and their number.

        Raises:
            ValueError: there are no labels, or another number to divide by; the model returned no loss.
        """
        labels = arguments.get("labels")
        if "num_items_in_batch" in arguments:
            raise ValueError("WeightedLoss divides by the number of labels itself: leave num_items_in_batch out")
        if not isinstance(labels, torch.Tensor):
            raise ValueError("WeightedLoss needs labels=..., which the model's loss is a mean over")
        count = count_labels(arguments, shifts=self.shifts)
        if count is None:  # a mean over rows
            count = torch.full((), len(labels), device=labels.device)
        else:  # a mean over no labels is 0 / 0, of which even the gradient times 0 is NaN
            arguments |= {
                name: arguments[name].masked_fill(count == 0, 0)
                for name in ("labels", "shift_labels")
                if arguments.get(name) is not None
            }
        loss = _first(self.model(**arguments))
        if not isinstance(loss, torch.Tensor):
            raise ValueError(f"{type(self.model).__name__} returned no loss for these arguments")
        return (loss.float() if loss.element_size() < 4 else loss) * count, count


class MultiGPUMixin:
    """Lets a Trainer run its model over several ranks: ``class Mine(MultiGPUMixin, transformers.Seq2SeqTrainer)``.

    A batch has ``per_device_train_batch_size`` rows for each rank.  A model's loss is one number, that of all rows, if
    it is a mean over items (labels that are not -100, or rows).  Logits come back joined, and ``compute_loss_func``
    runs once, on all rows.  Checkpoints have the keys of one device.

    Args:
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`; the model is on the first, which must
            be the device of the training arguments.  ``None``: all accelerators, or as many CPU ranks as
            ``MGPU_CORE_CPU_RANKS`` says.
        args, kwargs: of the Trainer.

    Raises:
        TypeError, ValueError: devices that do not exist, or another first device than that of the arguments.
    """

    args: Any
    accelerator: Any

    def __init__(self, *args: Any, device_ids: Sequence[DeviceLike] | None = None, **kwargs: Any) -> None:
        self._devices = tuple(local_devices() if device_ids is None else as_devices(device_ids))
        super().__init__(*args, **kwargs)
        if self._devices and self._devices[0] != as_devices([self.args.device])[0]:
            raise ValueError(f"the arguments put the model on {self.args.device}, and device_ids on {self._devices[0]}")
        self.args._n_gpu = len(self._devices)  # which the Trainer multiplies the rows of a batch by
        self._train_batch_size = self.args.train_batch_size

    def _wrap_model(self, model: Module, training: bool = True, dataloader: Any = None) -> Module:
        with self._one_gpu():
            model = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        if len(self._devices) < 2 or isinstance(model, torch.nn.DataParallel):
            return model
        return _Model(model, self._devices, self.accelerator)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss as on one device."""
        with self._one_gpu():
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_gpu():
            return super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _one_gpu(self) -> Iterator[None]:
        """Let the Trainer compute as if there were one GPU, since the wrapped model returns what one would."""
        before, self.args._n_gpu = self.args._n_gpu, 1
        try:
            yield
        finally:
            self.args._n_gpu = before


class MultiGPUTrainer(MultiGPUMixin, _Trainer):  # type: ignore[misc]
    """transformers' ``Trainer`` with :class:`MultiGPUMixin`: ``MultiGPUTrainer(model, args, device_ids=[0, 1])``."""


class _Model(DataParallel[Any]):
    """Weighs the ranks' losses by their numbers of items, so that their sum is the loss of all rows.

    It computes in the precision of the accelerator, which prepares no model that is wrapped.
    """

    def __init__(self, module: Module, devices: Sequence[torch.device], accelerator: Any) -> None:
        super().__init__(module, devices)
        self._accelerator = accelerator
        self._shifts = shifts_labels(module)
        self._divides = loss_function_of(module) is not None  # by num_items_in_batch; seen in training
        self._total: Any = None
        self._items: list[torch.Tensor] = []
        self._divisors: list[torch.Tensor] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._accelerator.native_amp:
            return super().forward(*inputs, **kwargs)
        with self._accelerator.autocast():
            outputs = super().forward(*inputs, **kwargs)
        return require("accelerate.utils", "MultiGPUTrainer").convert_to_fp32(outputs)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        kwargs = dict(kwargs or {})
        self._total = kwargs.pop("num_items_in_batch", None)
        parts, kwargs_parts = super().scatter(inputs, kwargs, device_ids)
        self._items = [_items(args, own, self._shifts) for args, own in zip(parts, kwargs_parts, strict=True)]
        self._divisors = [count.clamp(min=1).requires_grad_(torch.is_grad_enabled()) for count in self._items]
        if self._total is not None:
            for kwargs_of_rank, divisor in zip(kwargs_parts, self._divisors, strict=True):
                kwargs_of_rank["num_items_in_batch"] = divisor
        return parts, kwargs_parts

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        losses = [loss for loss in map(_loss_of, outputs) if loss is not None]
        if len(losses) < len(outputs):
            return super().gather(outputs, output_device)
        total = self._total
        if losses[0].requires_grad:
            grads = torch.autograd.grad(losses[0], self._divisors[0], retain_graph=True, allow_unused=True)
            self._divides = grads[0] is not None
        if total is None or not self._divides:
            total = torch.stack([to_device(count, self._items[0].device) for count in self._items]).sum()
        sums = []
        for output, loss, count in zip(outputs, losses, self._items, strict=True):
            # The mean of a rank without items is 0 / 0, and must not count.
            sums.append(_with_loss(output, torch.where(count > 0, loss * count, 0.0).reshape(1)))
        joined = super().gather(sums, output_device)
        loss = _first(joined).sum()
        return _with_loss(joined, loss / torch.as_tensor(total, device=loss.device))  # 0 / 0 if no rank has items


def _items(args: tuple[Any, ...], kwargs: Mapping[str, Any], shifts: bool) -> torch.Tensor:
    """Return how many items a rank's loss is a mean over: labels, or else rows."""
    counted = count_labels(kwargs, shifts=shifts)
    if counted is not None:
        return counted.float()
    first = tensors_in((args, dict(kwargs)))[0]
    return torch.tensor(float(len(first)), device=first.device)


def _first(output: Any) -> Any:
    """Return the entry of a model's outputs that is the loss, if there is one."""
    return output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None


def _loss_of(output: Any) -> torch.Tensor | None:
    loss = _first(output)
    return loss if isinstance(loss, torch.Tensor) and loss.ndim == 0 else None


def _with_loss(output: Any, loss: torch.Tensor) -> Any:
    """Return the outputs with another loss."""
    return (loss, *output[1:]) if isinstance(output, tuple) else type(output)(**{**output, "loss": loss})
