"""Count the weight that torch's own losses divide by: labels that are not ignored, each times the weight of its class.

``cross_entropy`` and ``nll_loss`` are means over that weight, and not over rows.  So the sum over ranks of each loss
times its weight, divided by the sum of the weights, is the loss of one device to the last digit, also where a rank has
no label at all.  The functions themselves, partials of them and their modules are known.  Of any other
function the call is watched: if the tensor that it returns is the result of one of the two, or that times a number or
in another dtype, it is weighed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from mgpu_core.step.loss import RankLoss

__all__ = ["LossWeights", "Weight", "reduction_of", "weight_of"]

Weight = float | torch.Tensor
"""The weight of a loss: a number on the host for labels on the CPU, otherwise a tensor on their device."""

_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_IGNORED = -100  # torch's default
_KEEPS_WEIGHT = ("NllLossBackward0", "NllLoss2DBackward0")
_SCALES = {
    *(torch.mul, torch.div, torch.Tensor.mul, torch.Tensor.div, torch.Tensor.__mul__, torch.Tensor.__rmul__),
    *(torch.Tensor.__truediv__, torch.Tensor.to, torch.Tensor.float, torch.Tensor.double),
}
"""Functions whose result is a loss times a number, or in another dtype."""


def reduction_of(loss_fn: Any, asked: str) -> str:
    """Return how a loss combines its rows: as a loss of torch does by its own ``reduction``, otherwise as was asked."""
    reduction = getattr(loss_fn, "reduction", None)
    if type(loss_fn).__module__ != nn.CrossEntropyLoss.__module__:
        function, keywords = _opened(loss_fn)
        if getattr(function, "__module__", None) != functional.__name__:
            return asked
        reduction = keywords.get("reduction", "mean")
    if asked == "weighted" or reduction not in ("mean", "sum", "batchmean"):
        return asked
    return "sum" if reduction == "sum" else "mean"


def _opened(loss_fn: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the function in partials with keywords alone, and these."""
    keywords: dict[str, Any] = {}
    while type(loss_fn) is partial and not loss_fn.args:
        keywords = {**loss_fn.keywords, **keywords}
        loss_fn = loss_fn.func
    return loss_fn, keywords


class LossWeights:
    """Calls the losses of a step, and counts their weights.

    Args:
        loss_fn: of the step.

    Attributes:
        is_known: the results of the last call had weights; ``None``: there was no call.
        keywords: of ``cross_entropy`` or ``nll_loss``, if the loss is that function; otherwise ``None``.
    """

    def __init__(self, loss_fn: Any) -> None:
        function, keywords = _opened(loss_fn)
        is_function = any(function is each for each in _FUNCTIONS)
        self.keywords: Mapping[str, Any] | None = keywords if is_function else None
        self._is_module = type(loss_fn) in _MODULES and not (loss_fn._forward_hooks or loss_fn._forward_pre_hooks)
        self.is_known: bool | None = None
        self._is_torchs = False  # a watched loss of the last call was torch's

    @property
    def are_exact(self) -> bool:
        """Return whether the loss is one of torch's itself, whose weights make it that of one device."""
        return self.keywords is not None or self._is_module

    def call(self, loss_fn: Callable[..., Any], output: Any, target: Any) -> tuple[Any, Weight | None]:
        """Return the result of a rank's loss function, and its weight; ``None``: a mean over rows, or not known."""
        if self.keywords is not None:
            result = loss_fn(output, target)
            return result, weight_of(output, target, **self.keywords, result=result)
        if self._is_module:
            module: Any = loss_fn
            settings = {"weight": module.weight, "ignore_index": module.ignore_index, "reduction": module.reduction}
            result = module(output, target)
            return result, weight_of(output, target, **settings, result=result)
        if self.is_known is False:
            return loss_fn(output, target), None
        watch = _Watch()
        with watch:
            result = loss_fn(output, target)
        value = result[0] if isinstance(result, tuple | list) and result else result
        if (call := watch.call_of(value)) is not None:
            self._is_torchs = True
            return result, weight_of(*call[0], **call[1], result=value)
        return result, None

    def settle(self, losses: Sequence[RankLoss]) -> None:
        """Note whether the losses of a call have weights.

        Raises:
            RuntimeError: those of some ranks alone have.
        """
        first = losses[0].weight
        if first is None:
            first = next((loss.weight for loss in losses if loss.weight is not None), None)
        self.is_known = first is not None or (None if self._is_torchs else False)  # soft targets have no weight
        self._is_torchs = False
        for rank, loss in enumerate(losses):
            if loss.weight is None and first is not None and not float(loss.value.detach()):
                loss.weight = 0.0  # a function of the user's has found no label, and returns nothing to learn
            if (loss.weight is None) is not (first is None):
                self.is_known = False
                one, other = (0, rank) if first is not None else (rank, 0)
                raise RuntimeError(
                    f"the loss of rank {one} is torch's mean over labels, and that of rank {other} is another number: "
                    "what they weigh cannot be told. Let loss_fn return (sum, weight) on all ranks, and pass "
                    'reduction="weighted"'
                )


class _Watch(TorchFunctionMode):
    """Notes the calls of the losses that divide by a weight, and their results times numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[torch.Tensor, int, tuple[Any, Any]]] = []  # results, their versions, arguments

    def call_of(self, value: Any) -> tuple[Any, Any] | None:
        """Return the arguments of the call whose result this tensor is, unless it was written since."""
        calls = (call for made, version, call in self._made if made is value and made._version == version)
        return next(calls, None)

    def __enter__(self) -> _Watch:
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FUNCTIONS:
            self._made.append((result, result._version, (args, kwargs or {})))
        elif func in _SCALES:
            calls = [each for arg in args if (each := self.call_of(arg)) is not None]
            if calls and sum(isinstance(arg, torch.Tensor) for arg in args) == 1:
                self._made.append((result, result._version, calls[0]))
        return result


def weight_of(
    _: Any,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = _IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    *__: Any,
    result: torch.Tensor | None = None,
    **___: Any,
) -> Weight | None:
    """Return the divisor of ``cross_entropy`` or ``nll_loss``; ``None`` where that is a number of rows, or nothing.

    For ``result`` torch has computed it: it keeps it for the backward.
    """
    if reduction != "mean" or type(target) is not torch.Tensor or target.dtype.is_floating_point:
        return None
    if result is not None and type(result.grad_fn).__name__ in _KEEPS_WEIGHT:
        node: Any = result.grad_fn
        if getattr(node._raw_saved_total_weight, "unpack_hook", True) is None:  # a checkpoint would run all again
            total: torch.Tensor = node._saved_total_weight
            if total.dtype in (torch.float32, torch.float64):  # half precision cannot count
                return total.item() if total.is_cpu else total
    kept = target.ne(ignore_index)
    if weight is not None:
        kept = weight.detach()[target.masked_fill(~kept, 0)] * kept
    if kept.is_cpu:
        return kept.sum().item()
    return kept.sum(dtype=torch.float32 if weight is None else None)  # of labels: no other kernel for the dtype
