"""Answers: each request's part of a batch's outputs, and the forms of requests that must not share a batch.

An answer depends on its own request alone.  So the outputs of a joined batch are divided only where each tensor has a
row for each row of the inputs, in a size that depends on no values.  The first requests of each form run alone, too,
and are compared, as are the 32nd, 64th, 128th ... .  A form that fails one of these is answered one request at a
time from then on, with one warning::

    batch of requests ── outputs ── a row for each row? ── rows of one size? ── compared: as alone? ── answers
                                          │ no                  │ no                   │ no
                                          └──────── each request alone, from now on ───┘

Methods other than the forward are answered one request at a time from the start: texts of a batch end with its longest
one.  A function ``split`` of the user takes the place of all but the comparisons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core.inference.requests import Call, Request
from mgpu_core.inference.sizes_of_values import SizesOfValues
from mgpu_core.parallel.scatter_inputs.cut import Arguments
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.comparison import difference
from mgpu_core.trees.containers import is_registered, opened
from mgpu_core.trees.nested import Rows, is_undivided, tensors_in

__all__ = ["Answers", "ApartError"]

_COMPARED = 16  # requests of a form
_FORMS = 4096  # are remembered


class ApartError(Exception):
    """Requests that must be answered one at a time."""


@dataclasses.dataclass
class _AnsweredForm:
    """The requests of a form, as far as they are known.

    Attributes:
        joined: how many requests of joined batches there were.
        is_apart: they are not joined any more.
    """

    joined: int
    is_apart: bool = False

    def compared(self, requests: int) -> Sequence[int]:
        """Return the places in the next batch whose requests are compared: the first 16, then the 32nd, 64th ... .

        Args:
            requests: how many the batch has.
        """
        if self.joined < _COMPARED:
            return range(min(_COMPARED - self.joined, requests))
        power = 1 << self.joined.bit_length()
        return [power - self.joined - 1] if power <= self.joined + requests else []


class Answers:
    """How outputs are divided among requests.

    Args:
        name: of the module, in warnings.
        split: a function of the outputs and of the list of calls that returns the output of each; ``None``: tensors
            and :class:`mgpu_core.Rows` are split along dimension 0.
        compares: run the first requests of each form alone, too.
        is_forward: requests are answered by the forward of the module.
    """

    def __init__(
        self, name: str, split: Callable[[Any, list[Call]], Sequence[Any]] | None, *, compares: bool,
        is_forward: bool = True,
    ) -> None:  # fmt: skip
        self._name, self._split, self._compares = name, split, compares
        self._all_apart = not is_forward and split is None
        self._forms: dict[Hashable, _AnsweredForm] = {}
        self._row_shapes: dict[Hashable, list[tuple[int, ...]]] = {}  # of outputs, by the keys of requests
        self._any_apart = False
        self._told: set[str] = set()

    def is_apart(self, request: Request) -> bool:
        """Return whether requests like this one are answered one at a time."""
        return self._all_apart or (self._any_apart and self._form(request).is_apart)

    def keep_apart(self, request: Request, reason: str) -> None:
        """Answer requests like this one at a time from now on; warn once."""
        form = self._form(request)
        if not form.is_apart and reason not in self._told:
            self._told.add(reason)
            warn_user(f"{reason}. Requests of this form are answered one at a time from now on", RuntimeWarning)
        form.is_apart = self._any_apart = True

    def _form(self, request: Request) -> _AnsweredForm:
        key = request.form
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _FORMS:
                self._forms.clear()  # they are found out again
            form = self._forms[key] = _AnsweredForm(0 if self._compares else _COMPARED)
        return form

    def watch(self, requests: Sequence[Request]) -> SizesOfValues | None:
        """Return a mode for the call of one of the first joined batches of a form; for :meth:`check_sizes`."""
        if len(requests) == 1 or self._split is not None or self._form(requests[0]).joined >= _COMPARED:
            return None
        return SizesOfValues()

    def check_sizes(self, watch: SizesOfValues | None, request: Request) -> None:
        """Raise ApartError if the call of a batch had sizes that depend on values."""
        if watch is not None and watch.found:
            self.keep_apart(
                request,
                f"{self._name} uses {watch.found}, whose size depends on the values of all rows, so outputs of a "
                "request may depend on others. To join them all the same, give the Predictor a function split=",
            )
            raise ApartError

    def split(self, outputs: Any, requests: Sequence[Request]) -> Sequence[Any]:
        """Return the answer of each request; that of a batch of one are the outputs as they are.

        Raises:
            ApartError: the outputs cannot be divided.
            ValueError: the user's function returned another number of answers than of requests.
        """
        if self._split is not None:
            parts = list(self._split(outputs, [each.call for each in requests]))
            if len(parts) != len(requests):
                raise ValueError(f"split returned {len(parts)} answers for {len(requests)} requests")
            return parts
        if len(requests) == 1:
            return [outputs]
        rows = [request.own_rows for request in requests]
        self.check_rows(outputs, sum(rows), requests[0])
        return [answer for (answer,) in Arguments({"outputs": outputs}, share=False).slices(rows, 0)]

    def check_rows(self, outputs: Any, rows: int, request: Request) -> None:
        """Raise ApartError unless the outputs of requests like this one have a row for each row of the inputs."""
        texts = {id(leaf) for leaf in request.leaves if isinstance(leaf, str)}
        reason = _undivided(outputs, rows, "outputs", texts)
        if reason is not None:
            self.keep_apart(
                request,
                f"outputs of {self._name} cannot be divided among requests: {reason}. Return tensors with a row for "
                "each row of the inputs, give the Predictor a function split=, or call mgpu_core.register_container",
            )
            raise ApartError

    def check_row_shapes(self, outputs: Any, requests: Sequence[Request]) -> None:
        """Raise ApartError where the outputs of a joined batch have other row shapes than those of another batch."""
        request = requests[0]
        if not self._compares or self._split is not None or self.is_apart(request):
            return
        if len(self._row_shapes) >= _FORMS:
            self._row_shapes.clear()
        shapes = [tuple(each.shape[1:]) for each in tensors_in(outputs)]
        before = self._row_shapes.setdefault(request.key, shapes)
        if before == shapes:
            return
        self.keep_apart(
            request,
            f"rows of the outputs of {self._name} have shapes {before} in one batch and {shapes} in another, of equal "
            "inputs but for their values. Give the Predictor a function split= that cuts the padding off",
        )
        if len(requests) > 1:
            raise ApartError

    def check_alone(
        self, requests: Sequence[Request], answers: Sequence[Any], run: Callable[[Request], Any], *, half: bool
    ) -> None:
        """Compare the first answers of a form, and some later ones, with those of the same requests alone.

        Args:
            requests: of a joined batch.
            answers: of the requests.
            run: returns the answer of a request that is alone.
            half: the module computes in half precision.

        Raises:
            ApartError: they differ, though a request alone has the same answer twice.
        """
        form = self._form(requests[0])
        if form.is_apart:
            raise ApartError
        joined = form.joined + len(requests)
        for index in form.compared(len(requests)):
            request = requests[index]
            first = run(request)
            reason = difference(answers[index], first, half=half)
            if reason is None:
                continue
            if difference(first, run(request), half=half) is not None:  # it draws random numbers, or counts its calls
                joined = max(joined, _COMPARED)
                break
            self.keep_apart(
                request,
                f"{self._name} gives a request other outputs in a batch than alone, as if its rows saw each other: "
                f"{reason}",
            )
            raise ApartError
        form.joined = joined


def _undivided(outputs: Any, rows: int, path: str, texts: Set[int]) -> str | None:
    """Return what has no row for each of ``rows``, as a sentence; ``None`` if all has.

    Args:
        texts: the ids of strings among the arguments, which are equal for all requests of the batch.
    """
    if outputs is None or id(outputs) in texts:
        return None
    if isinstance(outputs, torch.Tensor):
        if not is_undivided(outputs) and outputs.dim() and outputs.size(0) == rows:
            return None
        return f"{path} has shape {tuple(outputs.shape)}, and no row for each of the {rows} rows of the inputs"
    if isinstance(outputs, Rows):
        return None if len(outputs) == rows else f"{path} has {len(outputs)} Rows, not {rows}"
    container = opened(outputs) if _is_only_a_container(outputs) else None
    if container is None:
        name = type(outputs).__name__
        cure = " (a model of transformers leaves it out by use_cache=False)" if name.endswith("Cache") else ""
        return f"{path} is a {name}, whose rows are not known{cure}"
    names, values, _ = container
    pairs = zip(names, values, strict=True)
    return next(
        (text for name, each in pairs if (text := _undivided(each, rows, path + name, texts)) is not None), None
    )


def _is_only_a_container(obj: Any) -> bool:
    """Return whether the object is nothing but its entries, or was registered."""
    if is_registered(type(obj)):
        return True
    if isinstance(obj, PackedSequence) or (dataclasses.is_dataclass(obj) and not isinstance(obj, Mapping)):
        return False
    known = {id(None), *(map(id, obj.values()) if isinstance(obj, Mapping) else ())}
    return known.issuperset(map(id, getattr(obj, "__dict__", {}).values()))  # an attribute may be of all rows
