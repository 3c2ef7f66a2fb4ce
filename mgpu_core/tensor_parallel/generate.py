"""``generate`` of transformers in all ranks: criteria and processors of the user decide on rank 0 for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

from torch.nn import Module

from mgpu_core.tensor_parallel.meetings import decided

__all__ = ["arguments_of_ranks", "is_generate"]

_LISTS = {"stopping_criteria": "StoppingCriteriaList", "logits_processor": "LogitsProcessorList"}


def is_generate(net: Module, method: str) -> bool:
    """Return whether a method is the ``generate`` of a model of transformers."""
    return method == "generate" and hasattr(net, "generation_config")


def arguments_of_ranks(net: Any, inputs: Any, kwargs: Mapping[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return the arguments of ``generate`` for each rank, all by keyword.

    Streamers go to rank 0 alone; criteria that end a text, also by time, processors of logits and functions of allowed
    tokens decide there.

    Raises:
        ValueError: ``assistant_model``.
    """
    library: Any = import_module("transformers")
    arguments = dict(signature(net.generate).bind(*inputs, **kwargs).arguments)
    arguments |= arguments.pop("kwargs", {})
    if arguments.get("assistant_model") is not None:
        raise ValueError("assistant_model is one model for all ranks, which would run it at once: leave it out")
    config = arguments.get("generation_config") or net.generation_config
    given = {name: list(arguments.get(name) or []) for name in _LISTS}
    if (seconds := arguments.pop("max_time", config.max_time)) is not None:
        given["stopping_criteria"].append(library.MaxTimeCriteria(seconds))
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.max_time = None
    for name, entries in given.items():
        if entries:
            kind = getattr(library, _LISTS[name])
            arguments[name] = kind([_OfFirst(name, kind(entries))])
    if (allowed := arguments.get("prefix_allowed_tokens_fn")) is not None:
        arguments["prefix_allowed_tokens_fn"] = _OfFirst("prefix_allowed_tokens_fn", allowed)
    return [arguments, *({**arguments, "streamer": None} for _ in range(1, ranks))]


class _OfFirst:
    """A function of two arguments of which rank 0 calls the user's."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function

    def __call__(self, first: Any, second: Any) -> Any:
        return decided(self._name, partial(self._function, first, second))
