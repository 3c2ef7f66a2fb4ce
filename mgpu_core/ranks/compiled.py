"""Compiled modules: their replicas are compiled too, once per rank.

The results of ``torch.compile(module)`` and ``module.compile()`` are bound to that one module: a replica that carried
it along would compute with the original's weights.  Here the settings are taken out of it, and each rank gets a
function of its own, ``f(replica, *args)``, compiled with them.  The replicas of later forwards are other objects of the
same shape, for which the compiled code holds.

Torch's compiler is not made for several threads: while one compiles, another that enters compiled code fails.  So a
call that may compile, because its rank has not seen such arguments yet, has the compiler for itself; where it waits for
other ranks, in a synchronised layer, it compiles nothing and lends it to them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from mgpu_core.devices.exclusive import Exclusive
from mgpu_core.devices.traces import refuse_traces, what_to_trace
from mgpu_core.support.null_context import NULL_CONTEXT

__all__ = ["compiled_calls", "compiler_lent", "outside_the_compiler"]

_Call = Callable[..., Any]
_F = TypeVar("_F", bound=_Call)


def outside_the_compiler(function: _F) -> _F:
    """Return a function of threads and pointers, which no compiler and no trace of torch may look into.

    A compiled caller runs it as it is, as with ``torch.compiler.disable``; but a user who does not compile does not pay
    for the import of the compiler, nor for its six calls: they are made where a compiled caller is running.  In a trace
    it raises TypeError.
    """
    disabled: list[_Call] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if type(args) is not tuple:  # torch.fx, which traces this object itself, has put the module there
            raise what_to_trace()
        if _get_tracing_state() is not None or _len_torch_dispatch_stack():
            refuse_traces()
        run: _Call = function
        if _compiler_callback() is not None:
            if not disabled:
                disabled.append(torch.compiler.disable(function))
            run = disabled[0]
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the compiler's own mark: do not look inside
    return cast(_F, call)


_compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns the callback that inspects running frames; ``None``: there is none."""


def compiled_calls(module: Module, compiled: Module, ranks: int) -> list[_Call]:
    """Return one function per rank, to be called with a replica of ``module`` and its arguments.

    Args:
        module: the module itself.
        compiled: the compiled module, or the wrapper that ``torch.compile`` returned.
        ranks: how many.

    Raises:
        TypeError: a way of compiling that cannot be repeated for a replica.
    """
    settings = _settings_of(module, compiled)
    known, calls = _known.get(module, (None, []))
    if known is not settings:
        _known[module] = settings, calls = settings, []
    calls += [_for_rank(settings, rank) for rank in range(len(calls), ranks)]
    return calls[:ranks]


def _settings_of(module: Module, compiled: Module) -> Any:
    """Return torch's compiler object, with the settings used for this module."""
    if compiled is not module:
        hooked = compiled._forward_hooks or compiled._forward_pre_hooks
        settings = None if hooked else getattr(compiled, "dynamo_ctx", None)
    else:
        call = module.__dict__["_compiled_call_impl"]
        free = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
        settings = free["self"].cell_contents if "self" in free else None
    if not callable(settings) or isinstance(settings, Module):
        raise TypeError(
            f"{type(module).__name__} was compiled in a way that cannot be repeated for its replicas. Compile inside "
            "instead: decorate its forward (`@torch.compile` above `def forward`), which works on any number of devices"
        )
    return settings


# Of each module how it was compiled, and the functions of its ranks.
_known: weakref.WeakKeyDictionary[Module, tuple[Any, list[_Call]]] = weakref.WeakKeyDictionary()


def _for_rank(settings: Any, rank: int) -> _Call:
    # Torch keeps what it compiled by the code object and gives up after some variants: each rank has one of its own.
    def call(replica: Module, *args: Any, **kwargs: Any) -> Any:
        return replica._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_rank_{rank}")
    compiled = settings(call)
    seen: set[Any] = set()

    def run(replica: Module, *args: Any, **kwargs: Any) -> Any:
        kind = _kind_of(replica, args, kwargs)
        with _compiler.used(alone=kind not in seen):
            result = compiled(replica, *args, **kwargs)
        seen.add(kind)
        return result

    return run


def _kind_of(replica: Module, args: Any, kwargs: Any) -> Any:
    """Return the kind of arguments; a second call with the same kind compiles nothing."""
    leaves = [
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in tree_leaves((args, kwargs))
    ]
    return replica.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *leaves


class _Compiler:
    """Many may run compiled code at once, or one may compile."""

    def __init__(self) -> None:
        self.exclusive = Exclusive("torch.compile was busy in another rank, and not free")

    @contextmanager
    def used(self, alone: bool) -> Iterator[None]:
        """Wait until this use is allowed; one inside another, also in the ranks of a forward inside it, is."""
        if _inside.get():
            yield
            return
        token = _inside.set(True)
        try:
            with self.exclusive.enter(lambda: alone):
                yield
        finally:
            _inside.reset(token)


_inside: ContextVar[bool] = ContextVar("mgpu_core_inside_compiled", default=False)
_compiler = _Compiler()


def compiler_lent() -> AbstractContextManager[None]:
    """Around a wait of a rank for the others: one that compiles lets them compile meanwhile."""
    return _compiler.exclusive.lent() if _inside.get() else NULL_CONTEXT


def _after_fork_in_child() -> None:
    global _compiler
    _compiler = _Compiler()


os.register_at_fork(after_in_child=_after_fork_in_child)
