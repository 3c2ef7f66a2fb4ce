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
from mgpu_core.trees.marks import changed, held_by, marks_of
from mgpu_core.trees.replica_hooks import DICTIONARIES, SHARES_HOOKS, users_hooks

__all__ = ["Given", "SharedState", "given_attributes", "lost_attributes", "text_of_lost", "warn_lost"]


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
        kept_by: the module that ran as another rank, and keeps its attributes: equal plain values, such as a
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


def text_of_lost(names: Sequence[str]) -> str:
    """Return a text for an error of a call whose forwards have changed these attributes and objects; empty: unknown."""
    told = ", ".join(names[:_NAMED]) or "an object that all ranks share"
    return (
        f"the forward assigns or changes {told}: code outside of the forward, such as the loss, reads there what rank "
        '0, or the last rank, has left. Return such values from the forward; with workers="caller" each rank\'s loss '
        "comes before the next rank's forward"
    )


class SharedState:
    """The objects that attributes and hooks of a module hold beside layers and tensors, which all its ranks share.

    Args:
        module: before its ranks run.
        used_by: a loss function that is called per rank; objects that it reads are its rank's, and no state.
        of_hooks: only objects that hooks alone hold.
    """

    def __init__(self, module: Module, used_by: Any = None, *, of_hooks: bool = False) -> None:
        self._module, self._used_by, self._of_hooks = module, used_by, of_hooks
        self._read: set[str] = set()  # the names of objects that the loss function reads
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        read = {id(value) for value in ({} if self._used_by is None else held_by(self._used_by)).values()}
        named: dict[str, Any] = {}
        of_hooks: dict[str, Any] = {}
        for path, each in self._module.named_modules():
            prefix = f"{path}." if path else ""
            named |= {f"{prefix}{name}": value for name, value in vars(each).items() if name not in _TORCHS}
            for hook in users_hooks(each):
                place = f"of a hook on {path or 'the module'}"
                of_hooks |= {f"{name} {place}": value for name, value in held_by(hook).items()}
        own = set(map(id, named.values())) if self._of_hooks else set()
        named = {} if self._of_hooks else named
        named |= {name: value for name, value in of_hooks.items() if id(value) not in own}
        named = {name: value for name, value in named.items() if _is_shared(value)}
        self._read |= {name for name, value in named.items() if id(value) in read}
        return marks_of(named)

    def changed(self) -> list[str]:
        """Return the names of all that has changed since the last time."""
        before, self._before = self._before, self._now()
        return changed(before, self._before)

    def changed_again(self, before: set[str]) -> list[str]:
        """Return the names of all that has changed, and had in a call before; add those of this call to ``before``.

        A cache that is filled, or a setting that is made once, changes in one call alone.
        """
        found = [name for name in self.changed() if name not in self._read]
        names = [name for name in found if name in before]
        before.update(found)
        return names

    def tell(self, ranks: int, before: set[str]) -> bool:
        """Warn if so many ranks have changed some of it, again; return whether they have.

        Args:
            ranks: how many there are.
            before: the names of what earlier calls have changed; those of this one are added.
        """
        if names := self.changed_again(before):
            told = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
            warn_user(
                f"the forward of {type(self._module).__name__} changes {told}: all ranks share it, and change it "
                f"{ranks} times a call, where one device does so once. Return what it holds, or keep it in a buffer "
                "that is changed in place (rank 0's are the module's own)"
            )
        return bool(names)


def _is_shared(value: Any) -> bool:
    """Return whether ranks share this object, and can change its contents."""
    is_ours = type(value).__module__.startswith("mgpu_core.")  # the forward of a placement
    return not is_ours and not isinstance(value, Module | torch.Tensor | int | float | str | bytes | type | None)
