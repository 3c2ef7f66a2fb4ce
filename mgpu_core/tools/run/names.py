"""Replace torch's names for data parallelism with ours, for a while."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from mgpu_core.data_parallel import DataParallel, data_parallel
from mgpu_core.parallel import gather, parallel_apply, replicate, scatter, scatter_kwargs
from mgpu_core.tools.cpu_ranks import on_cpu_ranks, replaced_attribute
from mgpu_core.tools.run import functions
from mgpu_core.tools.run.auto_wrap import AutoWrap, not_counted, uncounted

__all__ = ["Replaced", "replacing_torch"]

_WRAP = ("none", "auto")

_OURS: dict[str, Any] = {
    "DataParallel": DataParallel,
    "data_parallel": data_parallel,
    "gather": gather,
    "parallel_apply": parallel_apply,
    "replicate": replicate,
    "scatter": scatter,
    "scatter_kwargs": scatter_kwargs,
    "Broadcast": functions.Broadcast,
    "Gather": functions.Gather,
    "ReduceAddCoalesced": functions.ReduceAddCoalesced,
    "Scatter": functions.Scatter,
}
_COUNTED = ("data_parallel", "gather", "parallel_apply", "replicate", "scatter", "scatter_kwargs")
"""The functions of a script that has no wrapper."""
_HOMES = {
    "torch.nn.parallel._functions": ("Broadcast", "Gather", "ReduceAddCoalesced", "Scatter"),
    "torch.nn.parallel.data_parallel": ("DataParallel", "data_parallel"),
    "torch.nn.parallel.parallel_apply": ("parallel_apply",),
    "torch.nn.parallel.replicate": ("replicate",),
    "torch.nn.parallel.scatter_gather": ("gather", "scatter", "scatter_kwargs"),
}
_OURS_OF = {id(getattr(import_module(home), name)): _OURS[name] for home, names in _HOMES.items() for name in names}
_TWICE = _HOMES.keys() - {"torch.nn.parallel._functions"}  # their names are in the public modules, too
_PUBLIC = ("torch.nn", "torch.nn.parallel")
"""Of torch's modules, the names are replaced in these and in their homes: DistributedDataParallel uses them, too."""


@dataclass(slots=True)
class Replaced:
    """What was replaced by :func:`replacing_torch`, and what was not; ``str()`` of it is for people.

    Attributes:
        names: that mean ours now, such as ``torch.nn.DataParallel``.
        wrapped: how often each net was given to a ``DataParallel`` so far, with its ranks.
        called: how often each function of ``torch.nn.parallel`` was called so far.
        left: classes of torch's that stay as they are, and a net that ``wrap="auto"`` could not wrap.
        hints: what may have made the script fail.
    """

    names: list[str] = field(default_factory=list)
    wrapped: Counter[str] = field(default_factory=Counter)
    called: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def uses(self) -> list[str]:
        """A line per net that was wrapped, and one on the functions that were called; empty: nothing was."""
        many = {text: f" ({count} times)" if count > 1 else "" for text, count in self.wrapped.items()}
        counts = ", ".join(f"{name} ({count} times)" for name, count in self.called.items())
        return [*(f"wrapped: {text}{times}" for text, times in many.items()), *[f"called: {counts}"] * bool(counts)]

    def __str__(self) -> str:
        lines = [f"replaced: {', '.join(self.names)}", *(self.uses or ["wrapped: nothing"])]
        return "\n".join([*lines, *(f"left: {each}" for each in self.left)])


@contextmanager
def replacing_torch(*, ranks: int | None = None, wrap: str = "none", dim: int = 0) -> Iterator[Replaced]:
    """Let ``torch.nn.DataParallel`` and the functions of ``torch.nn.parallel`` be mgpu_core's inside a ``with`` block.

    They are replaced in torch and in every imported module that holds them, for the whole process, and restored at the
    end.  ``DistributedDataParallel``, ``torch.nn.parallel.comm`` and classes that were derived from torch's
    ``DataParallel`` before the block stay as they are.

    Args:
        ranks: CPU ranks, on a machine without an accelerator: ``device_ids=None`` means that many, each id of an
            accelerator means one, and CUDA devices mean the CPU: in ``.cuda()``, ``.to(...)``, ``device=`` of any
            function and ``map_location=`` of ``torch.load``, in this thread and in its ranks.
        wrap: ``none``, or ``auto``: of the modules that hold the parameters of the first optimizer, the one that is
            called first runs on all devices, unless the code wraps it itself.  Its first outputs are compared with
            those of the plain net, and other ones are warned about.
        dim: the dimension of the rows, for ``wrap="auto"``.

    Raises:
        ValueError: ``ranks`` is not 1 to 9999, or there is an accelerator; another ``wrap``.
    """
    if wrap not in _WRAP:
        raise ValueError(f"wrap must be one of {', '.join(_WRAP)}, not {wrap!r}")
    replaced = Replaced(left=_left())
    counted = {name: _called(_OURS[name], replaced.called) for name in _COUNTED}
    with ExitStack() as stack:
        if ranks is not None:
            stack.enter_context(on_cpu_ranks(ranks))
            replaced.names.append("torch.load")
        for module, name, torchs in list(_holders()):
            ours = _OURS_OF[id(torchs)]
            stack.enter_context(replaced_attribute(module, name, counted.get(ours.__name__, ours)))
            replaced.names.append(f"{module.__name__}.{name}")
        replaced.names = sorted(name for name in replaced.names if name.rpartition(".")[0] not in _TWICE)
        stack.enter_context(replaced_attribute(DataParallel, "__init__", _counted(replaced.wrapped)))
        if wrap == "auto":
            stack.enter_context(AutoWrap(replaced.left.append, replaced.hints.append, dim).watching())
        yield replaced


def _holders() -> Iterator[tuple[ModuleType, str, Any]]:
    """Return the modules, and their names, that hold one of torch's objects."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        name = module.__name__
        if name in (*_PUBLIC, *_HOMES) or name.split(".")[0] not in ("torch", "mgpu_core"):
            for attribute, value in list(vars(module).items()):
                if id(value) in _OURS_OF:
                    yield module, attribute, value


def _left() -> list[str]:
    """Return the classes that are not replaced."""
    torchs: type[torch.nn.Module] = DataParallel.__mro__[1]
    derived = [each for each in torchs.__subclasses__() if each is not DataParallel]
    return [f"{each.__module__}.{each.__qualname__}, derived from torch's DataParallel before" for each in derived]


def _counted(wrapped: Counter[str]) -> Callable[..., None]:
    """Return the constructor of ``DataParallel``, which also counts what it wraps."""
    original = DataParallel.__init__

    @wraps(original)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if uncounted.get():  # data_parallel makes one for each call
            return
        devices = ", ".join(str(each) for each in self.device_ids)
        ranks = f"over {len(self.device_ids)} ranks ({devices})" if self.device_ids else "as the plain module"
        wrapped[f"{type(self.module).__name__} {ranks}"] += 1

    return constructed


def _called(function: Any, counts: Counter[str]) -> Any:
    """Return the function, which also counts its calls; those that it makes of others are its own."""

    @wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        if uncounted.get():
            return function(*args, **kwargs)
        counts[function.__name__] += 1
        with not_counted():
            return function(*args, **kwargs)

    return counting
