"""Objects that all ranks share, and a forward changes: each rank does so, where one device does so once."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from mgpu_core.parallel.first_calls.calls import Call, Observer
from mgpu_core.parallel.first_calls.lost import TORCHS, listed
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.marks import changed, held_by, marks_of
from mgpu_core.trees.replica_hooks import users_hooks

__all__ = ["SharedObjects"]


class SharedObjects(Observer):
    """The objects that attributes and hooks of a module hold beside layers and tensors, which all its ranks share.

    A cache that is filled, or a setting that is made once, changes in one call alone: the second change is told.

    Args:
        used_by: a loss function that is called per rank; objects that it reads are its rank's, and no state.
        of_hooks: only objects that hooks alone hold.
        consequence: of it, for the warning; empty: as a wrapper or a step has it.
    """

    def __init__(self, used_by: Any = None, *, of_hooks: bool = False, consequence: str = "") -> None:
        self._used_by, self._of_hooks, self._consequence = used_by, of_hooks, consequence
        self._read: set[str] = set()  # the names of objects that the loss function reads
        self._changed: set[str] = set()  # the names of those that a call has changed

    def now(self, module: Module) -> dict[str, Any]:
        """Return marks of how those of a module are now, by their names."""
        read = {id(value) for value in ({} if self._used_by is None else held_by(self._used_by)).values()}
        named: dict[str, Any] = {}
        of_hooks: dict[str, Any] = {}
        for path, submodule in module.named_modules():
            prefix = f"{path}." if path else ""
            named |= {f"{prefix}{name}": value for name, value in vars(submodule).items() if name not in TORCHS}
            for hook in users_hooks(submodule):
                place = f"of a hook on {path or 'the module'}"
                of_hooks |= {f"{name} {place}": value for name, value in held_by(hook).items()}
        attribute_ids = set(map(id, named.values())) if self._of_hooks else set()
        named = {} if self._of_hooks else named
        named |= {name: value for name, value in of_hooks.items() if id(value) not in attribute_ids}
        named = {name: value for name, value in named.items() if _is_shared(value)}
        self._read |= {name for name, value in named.items() if id(value) in read}
        return marks_of(named)

    def _changed_again(self, call: Call) -> list[str]:
        """Return the names of all that the call has changed, and one before it had."""
        changes = [name for name in self.changed(call) if name not in self._read]
        names = [name for name in changes if name in self._changed]
        self._changed.update(changes)
        return names

    def begin(self, call: Call) -> None:
        call.kept[self] = self.now(call.module)

    def changed(self, call: Call) -> list[str]:
        return changed(call.kept[self], self.now(call.module))

    def end(self, call: Call) -> bool:
        if names := self._changed_again(call):
            consequence = self._consequence or self._usual(len(call.modules))
            warn_user(f"the forward of {type(call.module).__name__} changes {listed(names)}: {consequence}")
        return bool(names)

    def _usual(self, ranks: int) -> str:
        return (
            f"all ranks share it, and change it {ranks} times a call, where one device does so once. Return what it "
            "holds, or keep it in a buffer that is changed in place (rank 0's are the module's own)"
        )


def _is_shared(value: Any) -> bool:
    """Return whether ranks share this object, and can change its contents."""
    is_ours = type(value).__module__.startswith("mgpu_core.")  # the forward of a placement
    return not is_ours and not isinstance(value, Module | torch.Tensor | int | float | str | bytes | type | None)
