"""Count the labels that a model's loss is a mean over, and warn where ranks have other shares of them than of rows.

A language model divides its loss by its labels other than -100.  Where ranks have unequal numbers of those, the mean of
the ranks' means is not the mean over all labels.  The losses hardly show it (5.7e-6 was measured where the gradient was
off by 139 %), but the counts do, and need no forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.parallel.first_calls.calls import Arguments, Call, Observer
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.nested import tensors_in

__all__ = ["LABELLED", "OF_A_STEP", "OF_A_WRAPPER", "Labels", "count_labels", "loss_function_of", "shifts_labels"]

LABELLED = 8
"""Calls whose labels are looked at: on an accelerator the host waits for the counts."""
_IGNORED = -100


def loss_function_of(net: Module) -> Any:
    """Return the loss function that a transformers model is given by its library; ``None``: its forward has its own."""
    model = _model_in(net)
    return model.loss_function if model is not None and "loss_function" in _code_of(model).co_names else None


def shifts_labels(net: Module) -> bool:
    """Return whether the loss of a transformers model leaves out the first label of each row, as causal models do.

    It is read off the class of the model that computes the loss; that of any other module counts all labels.
    """
    model, function = _model_in(net), loss_function_of(net)
    if model is None or getattr(model.config, "is_encoder_decoder", False):
        return False
    if function is not None:
        return getattr(function, "__name__", "") == "ForCausalLMLoss"
    return "shift_labels" in _code_of(model).co_varnames


def _model_in(net: Module) -> Any:
    return next((each for each in net.modules() if hasattr(type(each), "loss_function")), None)


def _code_of(model: Module) -> Any:
    return inspect.unwrap(type(model).forward).__code__


def count_labels(arguments: Mapping[str, Any], *, shifts: bool) -> torch.Tensor | None:
    """Return how many labels a model's loss is a mean over; ``None`` where no class indices are given as labels.

    Args:
        arguments: of the model, by name.
        shifts: the first label of each row is left out.
    """
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    if isinstance(shifted, torch.Tensor):
        labels, shifts = shifted, False
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.dim():
        return None
    return (labels[..., 1:] if shifts and labels.dim() > 1 else labels).ne(_IGNORED).sum()


OF_A_STEP = (
    "a loss that is a mean over labels is weighed by rows here, so that the loss, and even more the gradient, is not "
    'that of one device. Let the module return (loss * labels, labels), and pass reduction="weighted"; '
    "mgpu_core.integrations.transformers.WeightedLoss(model) does so"
)
OF_A_WRAPPER = (
    "where each rank returns the mean over its own labels, the mean of these numbers, and even more its gradient, is "
    "not that of one device. Wrap mgpu_core.integrations.transformers.WeightedLoss(model), which returns (loss * "
    "labels, labels) of each rank, and divide their sums; or use mgpu_core.TrainStep with it, which does so"
)


class Labels(Observer):
    """Warns where the ranks' shares of labels are not those by which their means are weighed.

    Args:
        advice: the end of the warning.
        of_outputs: a mean is a number that the module returns, and all weigh the same; otherwise all outputs are means,
            and their rows weigh them.
    """

    def __init__(self, advice: str, *, of_outputs: bool = False) -> None:
        self._advice, self._of_outputs = advice, of_outputs

    def end(self, call: Call) -> bool | None:
        if len(call.arguments) < 2:  # one rank has all rows, or a method ran
            return None
        if self._of_outputs and all(each.dim() for each in tensors_in(call.outputs[0])):
            return True
        shifts, rows, names = shifts_labels(call.module), call.rows, _names_of(call.module)
        counted = [count_labels(_named(each, names), shifts=shifts) for each in call.arguments]
        counts = [int(each) for each in counted if each is not None]
        if len(counts) < len(counted):
            return False
        divides = any("num_items_in_batch" in kwargs for _, kwargs in call.arguments)  # by the number it is given
        if self._of_outputs and (divides or _returns(call.outputs, counts)):
            return True
        weights = [1] * len(rows) if self._of_outputs else rows
        shares = [(count * sum(weights), each * sum(counts)) for count, each in zip(counts, weights, strict=True)]
        if all(one == other for one, other in shares):
            return False
        warn_user(
            f"the ranks have {', '.join(map(str, counts))} labels other than -100 in {', '.join(map(str, rows))} "
            f"rows: {self._advice}"
        )
        return True


def _returns(outputs: Sequence[Any], counts: Sequence[int]) -> bool:
    """Return whether each rank returns its number of labels, too, for the caller to divide by."""
    numbers = [[float(each.detach()) for each in tensors_in(output) if not each.dim()] for output in outputs]
    return all(count in of_rank for count, of_rank in zip(counts, numbers, strict=True))


def _named(arguments: Arguments, names: Sequence[str]) -> Mapping[str, Any]:
    """Return the arguments with their names, or the first dict, where a module takes one."""
    inputs, kwargs = arguments
    named = {**dict(zip(names, inputs, strict=False)), **kwargs}
    if "labels" in named or "shift_labels" in named:
        return named
    return next((each for each in inputs if isinstance(each, Mapping)), {})


def _names_of(net: Module) -> list[str]:
    """Return the names of the arguments that the forward takes by position."""
    try:
        return list(inspect.signature(net.forward).parameters)
    except (TypeError, ValueError):  # a compiled one does not tell
        return []
