"""Attributes that a forward pass assigns to its module: with replicas they are lost, and people should hear of it.

``self.steps += 1`` in a forward pass changes the replica, which is gone after the step.  ``torch.nn.DataParallel``
loses such values in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module

from mgpu_core.parallel.first_calls.calls import Call, Observer
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.layer_holders import entries_of
from mgpu_core.trees.replica_hooks import DICTIONARIES, SHARES_HOOKS

__all__ = ["TORCHS", "Given", "LostAttributes", "given_attributes", "listed", "lost_attributes", "text_of_lost"]


class _Given(NamedTuple):
    path: str
    module: Module
    attributes: dict[str, Any]
    buffers: dict[str, torch.Tensor | None]
    of_parameters: dict[str, dict[str, Any]]  # the attributes of each parameter
    entries: dict[str, list[Any]]  # of containers that were made again for the replica


Given: TypeAlias = list[_Given]
"""What each module of a replica was given."""

TORCHS = {*DICTIONARIES, SHARES_HOOKS, *vars(Module()), "_compiled_call_impl"}
"""Attributes that a forward changes by what it asks of torch: hooks, ``compile``."""
_NAMED = 5


def given_attributes(replica: Module) -> Given:
    """Return the replica's attributes before its forward pass; for :func:`lost_attributes`."""
    holders = vars(replica).get("_replica_holders", ())
    return [
        _Given(
            path,
            module,
            dict(vars(module)),
            dict(module._buffers.items()),
            {name: dict(vars(one)) for name, one in module._parameters.items() if one is not None},
            {name: entries_of(vars(module)[name]) for holder, name in holders if holder is module},
        )
        for path, module in replica.named_modules()
        if type(module)._replicate_for_data_parallel is Module._replicate_for_data_parallel  # RNNs keep lists
        and not type(module).__module__.startswith("mgpu_core.")  # wrappers keep what they have planned
    ]


def lost_attributes(given: Given, kept_by: Module | None = None) -> list[str]:
    """Return the names, such as ``encoder.steps``, of attributes assigned to the replica since then.

    Args:
        given: of the replica, before its forward.
        kept_by: the module that ran as another rank, and keeps its attributes: equal plain values, such as a
            note that something was done, are there as on one device.
    """
    lost: list[str] = []
    for path, module, attributes, buffers, of_parameters, entries in given:
        not_lost = TORCHS | attributes.get("_former_parameters", {}).keys() | _rewritten_by_hooks(module)
        names = [
            name
            for name, value in vars(module).items()
            if name not in not_lost
            and value is not attributes.get(name, _ABSENT)
            and not (name == "forward" and type(value).__module__.startswith("mgpu_core."))  # of a placement
            and not _is_kept(value, path, name, kept_by)
        ]
        names += [
            name
            for name, buffer in buffers.items()
            if buffer is not None and not buffer.requires_grad and dict(module._buffers.items()).get(name) is not buffer
        ]
        names += [
            f"{name}.{key}"
            for name, before in of_parameters.items()
            if (parameter := module._parameters.get(name)) is not None
            for key, value in vars(parameter).items()
            if key not in TORCHS and not key.startswith("_dynamo") and value is not before.get(key, _ABSENT)
        ]
        names += [name for name, before in entries.items() if _are_other(entries_of(vars(module).get(name)), before)]
        lost += [f"{path}.{name}" if path else name for name in names]
    return lost


_ABSENT = object()


def _is_kept(value: Any, path: str, name: str, kept_by: Module | None) -> bool:
    if kept_by is None or type(value) not in _NOTES:
        return False
    return any(vars(each).get(name, _ABSENT) == value for at, each in kept_by.named_modules() if at == path)


_NOTES = (bool, str, type(None))


def _are_other(now: list[Any], before: list[Any]) -> bool:
    return list(map(id, now)) != list(map(id, before))


def _rewritten_by_hooks(module: Module) -> set[str]:
    """Return the weights that a hook computes anew in every forward pass (weight_norm, spectral_norm, pruning)."""
    names = (getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in module._forward_pre_hooks.values())
    return {name for name in names if isinstance(name, str)}


class LostAttributes(Observer):
    """Warns of attributes that a forward assigns to its replica.

    Args:
        rank: whose replica is looked at.
        rank_0_keeps: rank 0 runs the user's own module, whose assignments persist; otherwise it has a replica, too.
        consequence: of it, for the warning; empty: as a wrapper or a step has it.
    """

    def __init__(self, *, rank: int = 0, rank_0_keeps: bool = False, consequence: str = "") -> None:
        self._rank, self._rank_0_keeps, self._consequence = rank, rank_0_keeps, consequence

    def begin(self, call: Call) -> None:
        call.kept[self] = given_attributes(call.modules[self._rank])

    def changed(self, call: Call) -> list[str]:
        return lost_attributes(call.kept[self], call.module if self._rank_0_keeps else None)

    def end(self, call: Call) -> bool:
        if names := self.changed(call):
            kind = type(call.module).__name__
            warn_user(f"the forward of {kind} assigns {listed(names)}: {self._consequence or self._usual()}")
        return bool(names)

    def _usual(self) -> str:
        lost = "with several ranks each assigns to a replica that is gone after the forward, so the value is lost"
        if self._rank_0_keeps:
            lost = "the module keeps the value of rank 0, and those of the other ranks are lost"
        return f"{lost}. Return it, or keep it in a buffer that is changed in place (rank 0's are the module's own)."


def listed(names: Sequence[str]) -> str:
    """Return some of the names, and how many there are more."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def text_of_lost(names: Sequence[str]) -> str:
    """Return a text for an error of a call whose forwards have changed these attributes and objects; empty: unknown."""
    told = listed(names) or "an object that all ranks share"
    return (
        f"the forward assigns or changes {told}: code outside of the forward, such as the loss, reads there what rank "
        '0, or the last rank, has left. Return such values from the forward; with workers="caller" each rank\'s loss '
        "comes before the next rank's forward"
    )
