"""``generate`` of transformers in all ranks: criteria and processors of the user decide on rank 0 for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.tensor_parallel.meetings import decided

__all__ = ["arguments_of_ranks", "is_generate"]

_LISTS = {"stopping_criteria": "StoppingCriteriaList", "logits_processor": "LogitsProcessorList"}


def is_generate(net: Module, method: str) -> bool:
    """Return whether a method is the ``generate`` of a model of transformers."""
    return method == "generate" and hasattr(net, "generation_config")


def arguments_of_ranks(kwargs: Mapping[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return the keyword arguments of ``generate`` for each rank.

    Streamers go to rank 0 alone; criteria that end a text, also by time, and processors of logits decide there.
    """
    if kwargs.get("assistant_model") is not None:
        raise ValueError("assistant_model is one model for all ranks, which would run it at once: leave it out")
    library: Any = import_module("transformers")
    own = dict(kwargs)
    criteria = list(own.get("stopping_criteria") or [])
    if (seconds := own.pop("max_time", None)) is not None:
        criteria.append(library.MaxTimeCriteria(seconds))
    given = {"stopping_criteria": criteria, "logits_processor": list(own.get("logits_processor") or [])}
    made = [own, *({**own, "streamer": None} for _ in range(1, ranks))]
    for name, entries in given.items():
        kind = getattr(library, _LISTS[name])
        own_list = kind(entries)
        for each in made if entries else ():
            each[name] = kind([_OfFirst(name, own_list)])
    return made


class _OfFirst:
    """Criteria or processors of which rank 0 calls the user's."""

    def __init__(self, name: str, own: Callable[..., torch.Tensor]) -> None:
        self._name, self._own = name, own

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return decided(self._name, partial(self._own, input_ids, scores))
