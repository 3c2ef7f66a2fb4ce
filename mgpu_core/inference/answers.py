"""Answers: each request's part of a batch's outputs, and the forms of requests that must not share a batch.

An answer depends on its own request alone.  So the outputs of a joined batch are divided only where each tensor has a
row for each row of the inputs, and the first requests of each form run alone, too, and are compared.  A form that fails
either is answered one request at a time from then on, with one warning::

    batch of requests ── outputs ── a row for each row? ── the first 16 of this form? ── as alone? ── answers
                                          │ no                                             │ no
                                          └──────────── each request alone, from now on ───┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from mgpu_core.inference.requests import Call, Request
from mgpu_core.parallel.scatter_inputs.cut import sliced
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.comparison import difference
from mgpu_core.trees.containers import is_registered, opened
from mgpu_core.trees.nested import Rows, flatten, is_undivided

__all__ = ["Answers", "ApartError"]

_COMPARED = 16  # requests of a form
_FORMS = 4096  # are remembered


class ApartError(Exception):
    """Requests that must be answered one at a time."""


class Answers:
    """How outputs are divided among requests.

    Args:
        name: of the module, in warnings.
        split: a function of the outputs and of the list of calls that returns the output of each; ``None``: tensors
            and :class:`mgpu_core.Rows` are split along dimension 0.
        compares: run the first requests of each form alone, too.
    """

    def __init__(self, name: str, split: Callable[[Any, list[Call]], Sequence[Any]] | None, *, compares: bool) -> None:
        self._name, self._split = name, split
        self._left = _COMPARED if compares else 0
        self._forms: dict[Hashable, int | None] = {}  # how many are still to be compared; None: not joined any more
        self._any_apart = False
        self._told: set[str] = set()

    def is_apart(self, request: Request) -> bool:
        """Return whether requests like this one are answered one at a time."""
        return self._any_apart and self._forms.get(request.form, 0) is None

    def keep_apart(self, request: Request, reason: str) -> None:
        """Answer requests like this one at a time from now on; warn once."""
        self._note(request.form, None)
        self._any_apart = True
        if reason not in self._told:
            self._told.add(reason)
            warn_user(f"{reason}. Requests of this form are answered one at a time from now on", RuntimeWarning)

    def _note(self, form: Hashable, left: int | None) -> None:
        if len(self._forms) >= _FORMS:
            self._forms.clear()  # they are found out again
        self._forms[form] = left

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
        leaves: list[Any] = []
        tree = flatten(outputs, leaves, "outputs")
        columns = [sliced(leaf, rows, 0) for leaf in leaves]
        return list(tree.columns(iter(columns), len(rows)))

    def check_rows(self, outputs: Any, rows: int, request: Request) -> None:
        """Raise ApartError unless the outputs of requests like this one have a row for each row of the inputs."""
        reason = _undivided(outputs, rows, "outputs")
        if reason is not None:
            self.keep_apart(
                request,
                f"outputs of {self._name} cannot be divided among requests: {reason}. Return tensors with a row for "
                "each row of the inputs, give the Predictor a function split=, or call mgpu_core.register_container",
            )
            raise ApartError

    def check_alone(
        self, requests: Sequence[Request], answers: Sequence[Any], run: Callable[[Request], Any], *, half: bool
    ) -> None:
        """Compare the first answers of a form with those of the same requests alone.

        Args:
            requests: of a joined batch.
            answers: of the requests.
            run: returns the answer of a request that is alone.
            half: the module computes in half precision.

        Raises:
            ApartError: they differ, though a request alone has the same answer twice.
        """
        form = requests[0].form
        left = self._forms.get(form, self._left)
        if left is None:
            raise ApartError
        for request, answer in zip(requests[:left], answers, strict=False):
            first = run(request)
            found = difference(answer, first, half=half)
            if found is None:
                continue
            if difference(first, run(request), half=half) is not None:  # it draws random numbers, or counts its calls
                left = 0
                break
            self.keep_apart(
                request,
                f"{self._name} gives a request other outputs in a batch than alone, as if its rows saw each other: "
                f"{found}",
            )
            raise ApartError
        if left:
            self._note(form, max(0, left - len(requests)))
        elif form not in self._forms:
            self._note(form, 0)


def _undivided(outputs: Any, rows: int, path: str) -> str | None:
    """Return what has no row for each of ``rows``, as a sentence; ``None`` if all has."""
    if outputs is None:
        return None
    if isinstance(outputs, torch.Tensor):
        if not is_undivided(outputs) and outputs.dim() and outputs.size(0) == rows:
            return None
        return f"{path} has shape {tuple(outputs.shape)}, and no row for each of the {rows} rows of the inputs"
    if isinstance(outputs, Rows):
        return None if len(outputs) == rows else f"{path} has {len(outputs)} Rows, not {rows}"
    found = opened(outputs) if _is_only_a_container(outputs) else None
    if found is None:
        return f"{path} is a {type(outputs).__name__}, whose rows are not known"
    names, values, _ = found
    pairs = zip(names, values, strict=True)
    return next((text for name, each in pairs if (text := _undivided(each, rows, path + name)) is not None), None)


def _is_only_a_container(obj: Any) -> bool:
    """Return whether the object is nothing but its entries, or was registered."""
    if is_registered(type(obj)):
        return True
    if isinstance(obj, PackedSequence) or (dataclasses.is_dataclass(obj) and not isinstance(obj, Mapping)):
        return False
    known = {id(None), *(map(id, obj.values()) if isinstance(obj, Mapping) else ())}
    return known.issuperset(map(id, getattr(obj, "__dict__", {}).values()))  # an attribute may be of all rows
