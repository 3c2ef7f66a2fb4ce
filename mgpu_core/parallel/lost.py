"""Attributes that a forward pass assigns to its module: with replicas they are lost, and people should hear of it.

``self.steps += 1`` in a forward pass changes the replica, which is gone after the step.  ``torch.nn.DataParallel``
loses such values in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module

from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.layer_holders import entries_of
from mgpu_core.trees.replica_hooks import DICTIONARIES, SHARES_HOOKS

__all__ = ["Given", "given_attributes", "lost_attributes", "warn_lost"]


class _Given(NamedTuple):
    path: str
    module: Module
    attributes: dict[str, Any]
    buffers: dict[str, torch.Tensor | None]
    of_parameters: dict[str, dict[str, Any]]  # the attributes of each parameter
    entries: dict[str, list[Any]]  # of containers that were made again for the replica


Given: TypeAlias = list[_Given]
"""What each module of a replica was given."""

_TORCHS = {*DICTIONARIES, SHARES_HOOKS, *vars(Module()), "_compiled_call_impl"}
"""Attributes that a forward changes by what it asks of torch: hooks, ``compile``."""
_NAMED = 5


def given_attributes(replica: Module) -> Given:
    """Return the replica's attributes before its forward pass; for :func:`lost_attributes`."""
    made = vars(replica).get("_replica_holders", ())
    return [
        _Given(
            path,
            each,
            dict(vars(each)),
            dict(each._buffers.items()),
            {name: dict(vars(one)) for name, one in each._parameters.items() if one is not None},
            {name: entries_of(vars(each)[name]) for module, name in made if module is each},
        )
        for path, each in replica.named_modules()
        if type(each)._replicate_for_data_parallel is Module._replicate_for_data_parallel  # RNNs keep lists
        and not type(each).__module__.startswith("mgpu_core.")  # wrappers keep what they have planned
    ]


def lost_attributes(given: Given, kept_by: Module | None = None) -> list[str]:
    """Return the names, such as ``encoder.steps``, of attributes assigned to the replica since then.

    Args:
        given: of the replica, before its forward.
        kept_by: the module that ran as another rank, and keeps what was assigned to it: equal plain values, such as a
            note that something was done, are there as on one device.
    """
    lost: list[str] = []
    for path, module, attributes, buffers, of_parameters, entries in given:
        not_lost = _TORCHS | attributes.get("_former_parameters", {}).keys() | _rewritten_by_hooks(module)
        names = [
            name
            for name, value in vars(module).items()
            if name not in not_lost
            and value is not attributes.get(name, _ABSENT)
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
            if key not in _TORCHS and not key.startswith("_dynamo") and value is not before.get(key, _ABSENT)
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


def warn_lost(kind_name: str, names: Sequence[str], *, rank_0_keeps: bool = False) -> None:
    """Warn that a forward pass of such a module assigned these attributes.

    Args:
        rank_0_keeps: rank 0 runs the user's own module, so its assignments persist.
    """
    told = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        told += f" and {len(names) - _NAMED} more"
    what_happens = "with several ranks each assigns to a replica that is gone after the forward, so the value is lost"
    if rank_0_keeps:
        what_happens = "the module keeps the value of rank 0, and those of the other ranks are lost"
    warn_user(
        f"the forward of {kind_name} assigns {told}: {what_happens}. Return it, or keep it in a buffer that is "
        "changed in place (rank 0's are the module's own)."
    )
