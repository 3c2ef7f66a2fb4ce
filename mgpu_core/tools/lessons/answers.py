"""Helpers of the exercises' checkers, which name the call, the expected and the actual result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["WrongAnswer", "asks_for", "asked_for", "expect", "expect_raises", "shown"]

Check = Callable[[Any], None]
_LONGEST = 160


class WrongAnswer(AssertionError):
    """An answer that is not right; the text has the input, the expected and the actual result."""


def asks_for(name: str) -> Callable[[Check], Check]:
    """Mark a check: it is given the learner's function of this name."""

    def marked(check: Check) -> Check:
        check.__dict__["asks_for"] = name
        return check

    return marked


def asked_for(check: Check) -> str:
    """Return the name of the function that a check is given."""
    return str(check.__dict__["asks_for"])


def expect(call: str, got: object, wanted: object) -> None:
    """Raise WrongAnswer unless both are the same: tensors in dtype, shape and every element, numbers exactly."""
    difference = _difference(got, wanted, "")
    if difference:
        raise WrongAnswer(f"{call}: {difference}")


def expect_raises(call: str, kind: type[Exception], function: Callable[[], object]) -> Exception:
    """Call the function; raise WrongAnswer unless that raises an exception of this kind, which is returned."""
    try:
        got = function()
    except kind as error:
        return error
    raise WrongAnswer(f"{call}: expected a {kind.__name__}, got {shown(got)}")


def shown(value: object) -> str:
    """Return a value in one line, of a bearable length."""
    text = " ".join(_text(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {value.tolist()}"
    if type(value) is list:
        return f"[{', '.join(map(_text, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_text(each)}' for key, each in value.items())}}}"
    return repr(value)


def _difference(got: object, wanted: object, where: str) -> str:
    """Empty: there is none."""
    if isinstance(wanted, torch.Tensor):
        return _tensor_difference(got, wanted, where)
    if isinstance(wanted, Mapping):
        if not isinstance(got, Mapping) or list(got) != list(wanted):
            return _told(got, wanted, where)
        return next(filter(None, (_difference(got[key], wanted[key], f"{where}[{key!r}]") for key in wanted)), "")
    if isinstance(wanted, list | tuple):
        return _sequence_difference(got, wanted, where)
    kinds = (_kind(got), _kind(wanted))
    same = kinds[0] is kinds[1] and (got is wanted or got == wanted)
    return "" if same else _told(got, wanted, where)


def _kind(value: object) -> type:
    """Return whether it is a number, whole or not; True is none."""
    return float if type(value) is int else type(value)


def _tensor_difference(got: object, wanted: torch.Tensor, where: str) -> str:
    if not isinstance(got, torch.Tensor):
        return _told(got, wanted, where)
    if got.shape != wanted.shape:
        return f"{where or 'the result'} should have shape {tuple(wanted.shape)}, and has {tuple(got.shape)}"
    same = got.dtype == wanted.dtype and torch.equal(got, wanted)
    return "" if same else _told(got.detach(), wanted.detach(), where)


def _sequence_difference(got: object, wanted: Sequence[object], where: str) -> str:
    if not isinstance(got, list | tuple):
        return _told(got, wanted, where)
    if not any(isinstance(each, torch.Tensor | Mapping) for each in wanted):
        return "" if list(got) == list(wanted) else _told(got, wanted, where)
    if len(got) != len(wanted):
        return f"{where or 'the result'} should have {len(wanted)} entries, and has {len(got)}: {shown(got)}"
    return next(filter(None, (_difference(got[i], each, f"{where}[{i}]") for i, each in enumerate(wanted))), "")


def _told(got: object, wanted: object, where: str) -> str:
    return f"{where + ': ' if where else ''}expected {shown(wanted)}, got {shown(got)}"
