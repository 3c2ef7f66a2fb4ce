"""The loss of each rank: the call of the loss function, the check of its result, and its weight.

Torch's own losses divide by a weight: labels that are not ignored, each times the weight of its class.
``cross_entropy`` and ``nll_loss`` are means over that weight, and not over rows.  So the sum over ranks of each loss
times its weight, divided by the sum of the weights, is the loss of one device to the last digit, also where a rank has
no label at all.  The functions themselves, partials of them and their modules are known.  Of any other function the
call is watched: if the tensor that it returns is the result of one of the two, or that times a number or in another
dtype, it is weighed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from mgpu_core.support.null_context import NULL_CONTEXT

__all__ = ["Losses", "RankLoss", "RankPart", "number_of", "output_loss", "rank_loss", "reduction_of"]

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
_WIDE = {torch.float32, torch.float64}  # that a loss is kept in as it is


@dataclass(slots=True)
class RankPart:
    """The inputs of one rank, and the factor of its loss before backward."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]  # empty where the module returns the loss
    seed: float | torch.Tensor = 1.0
    watch: AbstractContextManager[None] | None = None  # to be entered around the loss function
    unit: float = 0.0  # the factor of a mean over labels, besides their weight; 0: weights are not counted


@dataclass(slots=True)
class RankLoss:
    """The loss of one rank.

    Attributes:
        value: the number to differentiate.
        weight: for ``weighted``, the weight next to the sum; for a mean over labels its divisor; ``None``:
            a mean over rows, or a sum.
        aux: further numbers by name, which are weighed like the loss.
        is_constant: it has no gradient: none of this rank's rows gave a reason to learn.
    """

    value: torch.Tensor
    weight: torch.Tensor | float | None = None
    aux: Mapping[str, Any] | None = None
    is_constant: bool = False


class Losses:
    """The losses of a step's ranks: calls the loss function of each, and counts the weights that torch's divide by.

    Args:
        loss_fn: of one rank; ``None``: the module returns the loss.
        reduction: of the step.
        amp_dtype: forwards and losses run under autocast in this dtype; ``None``: without.
        caches_casts: autocast keeps the parameters in this dtype until it ends.

    Attributes:
        amp_dtype: the same.
        counts: weights are counted, in calls whose parts have a unit.
        are_known: the results of the last call had weights; ``None``: there was no call.
    """

    def __init__(
        self, loss_fn: Any, reduction: str, amp_dtype: torch.dtype | None, *, caches_casts: bool = True
    ) -> None:
        self._reduction, self.amp_dtype, self._caches_casts = reduction, amp_dtype, caches_casts
        self.counts = reduction == "mean" and loss_fn is not None
        self._keywords, self._is_module = _keywords_of(loss_fn), _is_torchs_module(loss_fn)
        self.are_known: bool | None = None
        self._is_torchs = False  # a watched loss of the last call was torch's

    @property
    def are_exact(self) -> bool:
        """Return whether the loss is one of torch's itself, whose weights make it that of one device."""
        return self._keywords is not None or self._is_module

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context that forwards and losses run in on a device."""
        if self.amp_dtype is None:
            return NULL_CONTEXT
        return torch.autocast(device.type, dtype=self.amp_dtype, cache_enabled=self._caches_casts)

    def of(self, output: Any, loss_fn: Callable[..., Any] | None, part: RankPart) -> RankLoss:
        """Return the loss of a rank; set the part's factor before backward, if the loss is a mean over labels."""
        if loss_fn is None:
            return rank_loss(output_loss(output), self._reduction)
        if part.watch is not None:
            watch, part.watch = part.watch, None
            with watch:
                return self.of(output, loss_fn, part)
        if not part.unit or not self.counts:
            return rank_loss(loss_fn(output, *part.target), self._reduction)
        if self._keywords is None:
            result, weight = self.call(loss_fn, output, *part.target)
        else:
            result = loss_fn(output, *part.target)
            weight = weight_of(output, *part.target, **self._keywords, result=result)
        loss = rank_loss(result, self._reduction)
        if weight is not None:
            weight = weight.to(loss.value.dtype) if type(weight) is torch.Tensor else weight
            loss.weight, part.seed = weight, weight * part.unit
        return loss

    def call(self, loss_fn: Callable[..., Any], output: Any, target: Any) -> tuple[Any, Weight | None]:
        """Return the result of a rank's loss function, and its weight; ``None``: a mean over rows, or not known."""
        if self._keywords is not None:
            result = loss_fn(output, target)
            return result, weight_of(output, target, **self._keywords, result=result)
        if self._is_module:
            module: Any = loss_fn
            settings = {"weight": module.weight, "ignore_index": module.ignore_index, "reduction": module.reduction}
            result = module(output, target)
            return result, weight_of(output, target, **settings, result=result)
        if self.are_known is False:
            return loss_fn(output, target), None
        watch = _LossCalls()
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
        self.are_known = first is not None or (None if self._is_torchs else False)  # soft targets have no weight
        self._is_torchs = False
        for rank, loss in enumerate(losses):
            if loss.weight is None and first is not None and not float(loss.value.detach()):
                loss.weight = 0.0  # a function of the user's has found no label, and returns nothing to learn
            if (loss.weight is None) is not (first is None):
                self.are_known = False
                one, other = (0, rank) if first is not None else (rank, 0)
                raise RuntimeError(
                    f"the loss of rank {one} is torch's mean over labels, and that of rank {other} is another number: "
                    "what they weigh cannot be told. Let loss_fn return (sum, weight) on all ranks, and pass "
                    'reduction="weighted"'
                )


def rank_loss(result: Any, reduction: str) -> RankLoss:
    """Check the result of a loss function: ``loss`` or ``(loss, {name: number})``; ``weighted``: see the step.

    Raises:
        TypeError, ValueError: it is not one number, or for ``weighted`` not a pair of numbers.
    """
    if type(result) is torch.Tensor and result.ndim == 0 and result.dtype in _WIDE and reduction != "weighted":
        return RankLoss(result)  # as a rule
    aux: Mapping[str, Any] | None = None
    if isinstance(result, tuple | list) and len(result) > 1 and isinstance(result[-1], Mapping):
        *result, aux = result
        result = result[0] if reduction != "weighted" and len(result) == 1 else result
    if reduction != "weighted":
        return RankLoss(number_of(result, "the loss"), aux=aux)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            'reduction="weighted" needs (sum, weight) or (sum, weight, {name: number}) from loss_fn, or from the '
            f"module as mgpu_core.integrations.transformers.WeightedLoss(model) returns it, not {_described(result)}"
        )
    value = number_of(result[0], "the sum of the losses")
    weight = result[1] if isinstance(result[1], torch.Tensor) else torch.full((), float(result[1]), device=value.device)
    return RankLoss(value, number_of(weight, "the weight").detach().to(value.dtype), aux)


def output_loss(output: Any) -> Any:
    """Return the loss of a module that has no loss function: its output, or the output's ``loss``."""
    return output if isinstance(output, torch.Tensor | tuple | list) else getattr(output, "loss", output)


def number_of(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, Mapping):
        raise TypeError(
            f'{name} must be a tensor of one element, not {_described(value)}: return (loss, {{"name": number}}), and '
            "step(..., aux=True) returns the further numbers, too"
        )
    if value is None:
        raise TypeError(
            f"{name} must be a tensor of one element, not None: with loss_fn=None the module returns it, as models of "
            "transformers do for batches with labels"
        )
    if not isinstance(value, torch.Tensor):
        hint = ': (sum, weight) needs reduction="weighted"' if isinstance(value, tuple) and len(value) == 2 else ""
        raise TypeError(f"{name} must be a tensor of one element, not {_described(value)}{hint}")
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be one number, not a tensor of shape {tuple(value.shape)}: reduce it over its rows"
        )
    # Half precision could hold neither a loss scale nor the sum of many weights.
    return value.reshape(()).float() if value.element_size() < 4 else value.reshape(())


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def reduction_of(loss_fn: Any, asked: str) -> str:
    """Return how a loss combines its rows: as a loss of torch does by its own ``reduction``, otherwise as was asked."""
    reduction = getattr(loss_fn, "reduction", None)
    if type(loss_fn).__module__ != nn.CrossEntropyLoss.__module__:
        function, keywords = _opened(loss_fn)
        if getattr(function, "__module__", None) != functional.__name__:
            return asked
        reduction = keywords.get("reduction", "mean")
        if {"size_average", "reduce"} & keywords.keys():  # torch's old words
            old = keywords.get("size_average"), keywords.get("reduce")
            reduction = legacy_get_string(*old, emit_warning=False)
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


def _keywords_of(loss_fn: Any) -> Mapping[str, Any] | None:
    """Return the keywords of ``cross_entropy`` or ``nll_loss``, if the loss is that function; otherwise ``None``."""
    function, keywords = _opened(loss_fn)
    return keywords if any(function is known for known in _FUNCTIONS) else None


def _is_torchs_module(loss_fn: Any) -> bool:
    """Return whether a loss is the module of one of the two, as torch calls it."""
    return type(loss_fn) in _MODULES and not (loss_fn._forward_hooks or loss_fn._forward_pre_hooks)


class _LossCalls(TorchFunctionMode):
    """Notes the calls of the losses that divide by a weight, and their results times numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[torch.Tensor, int, tuple[Any, Any]]] = []  # results, their versions, arguments

    def call_of(self, value: Any) -> tuple[Any, Any] | None:
        """Return the arguments of the call whose result this tensor is, unless it was written since."""
        calls = (call for made, version, call in self._made if made is value and made._version == version)
        return next(calls, None)

    def __enter__(self) -> _LossCalls:
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
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce, emit_warning=False)
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
