"""Calls of one module by several workers at once, as long as they do not change it for the others.

An attribute or a hook that a call sets belongs to the one module, and so to all calls that are on their way::

    worker 0   ─ hook of adapter A ─ layers ─────────── removed ─
    worker 1   ────── hook of adapter B ─ layers: A and B ─ removed ─

So the first call of each branch of its code, as far as the arguments tell, runs alone and is watched.  A change
that a module makes once, such as a hook that it installs, is made then.  A change that a second call makes again, every
call makes: from then on they run one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from mgpu_core.devices.exclusive import Exclusive
from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.lost import LostAttributes
from mgpu_core.parallel.first_calls.shared import SharedObjects
from mgpu_core.support.warnings import warn_user

__all__ = ["CallsAtOnce"]

_SHOWN = 3


def _code(function: Any) -> CodeType:
    code: CodeType = function.__code__
    return code


_SETS, _DELETES, _REMOVES = map(_code, (Module.__setattr__, Module.__delattr__, RemovableHandle.remove))
_REGISTERS = {_code(each) for name, each in vars(Module).items() if name.startswith("register_") and "hook" in name}
_HOOKS = tuple(name for name in vars(Module()) if name.endswith("_hooks"))


class CallsAtOnce:
    """Let several workers call a module at once, unless its calls change it.

    Args:
        module: the one module of all workers.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._exclusive = Exclusive(f"other calls of {type(module).__name__} did not end")
        self._one_at_a_time = False
        self._known: set[Hashable] = set()  # whose calls change nothing
        self._changed: set[str] = set()  # by a call so far

    @contextmanager
    def call(self, branch: Hashable) -> Iterator[None]:
        """Run a call inside; alone where calls of this branch may change the module."""
        with self._exclusive.enter(lambda: self._one_at_a_time or branch not in self._known):
            if not self._exclusive.is_alone or self._one_at_a_time or sys.getprofile() is not None:
                yield
                return
            first = FirstCalls((LostAttributes(), 1), (SharedObjects(), 1))
            watched = first.begin(Call(self._module, [self._module]))
            with _watched(self._module) as changes:
                yield
            self._learn(branch, {*changes, *first.changed(watched)})

    def _learn(self, branch: Hashable, changes: set[str]) -> None:
        """Note the changes of a call that ran alone; warn where one before it has made the same."""
        again = sorted(changes & self._changed)
        self._changed |= changes
        if not changes:
            self._known.add(branch)
        if again:
            self._one_at_a_time = True
            self._known.clear()
            name = type(self._module).__name__
            warn_user(
                f"calls of {name} change {', '.join(again[:_SHOWN])}, and all in flight share the one module: they run "
                "one at a time from now on. Give them as arguments, or leave in_flight= out",
                RuntimeWarning,
            )


@contextmanager
def _watched(module: Module) -> Iterator[set[str]]:
    """Yield the names of attributes and hooks that are set or removed inside, by this thread, also for a while.

    Python tells a profile function of each call: those of torch that set attributes and register hooks are among them.
    """
    paths = {id(each): path for path, each in module.named_modules()}
    tables = {id(vars(each)[name]): path for path, each in module.named_modules() for name in _HOOKS}
    changes: set[str] = set()

    def told(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or (code not in _REGISTERS and code not in (_SETS, _DELETES, _REMOVES)):
            return
        variables = frame.f_locals
        changed = variables["self"]
        table = changed.hooks_dict_ref() if code is _REMOVES else None
        path = paths.get(id(changed)) if table is None else tables.get(id(table))
        hook = variables.get("hook") if table is None else table.get(changed.id)
        if path is None or getattr(hook, "__module__", "").startswith("mgpu_core."):  # those of a placement
            return
        if code is not _SETS and code is not _DELETES:
            changes.add(f"hooks of {path or 'the net'}")
        elif code is _DELETES or not _has(changed, variables["name"], variables["value"]):
            changes.add(f"{path}.{variables['name']}" if path else variables["name"])

    sys.setprofile(told)
    try:
        yield changes
    finally:
        sys.setprofile(None)


def _has(module: Module, name: str, value: Any) -> bool:
    """Return whether an attribute of a module is this object."""
    tables: list[Any] = [vars(module), module._modules, module._buffers, module._parameters]
    return any(name in table and table[name] is value for table in tables)
