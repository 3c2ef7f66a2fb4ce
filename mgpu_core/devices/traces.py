"""Traces of torch, which record operations on tensors and see nothing of kernels that write through pointers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.fx import Proxy

__all__ = ["is_symbolic", "refuse_traces", "traced_call", "what_to_trace"]

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_is_proxy = partial(type.__instancecheck__, Proxy)


def refuse_traces() -> None:
    """Raise TypeError in a thread that ``torch.jit.trace``, ``make_fx`` or ``torch.export`` records."""
    if _get_tracing_state() is not None:
        raise what_to_trace()
    if _len_torch_dispatch_stack() and (torch._C._get_dispatch_mode(_PROXY) or torch.compiler.is_exporting()):
        raise what_to_trace()


def what_to_trace() -> TypeError:
    """Return the error that says what can be traced."""
    return TypeError(
        "torch.jit.trace, torch.fx, make_fx and torch.export do not see what mgpu_core writes into memory: the trace "
        "would compute with garbage. Trace the module itself (`.module` of a wrapper), and wrap the result"
    )


def is_symbolic(arguments: Iterable[Any]) -> bool:
    """Return whether one of the arguments is a proxy of ``torch.fx.symbolic_trace``."""
    return any(map(_is_proxy, arguments))


def traced_call(module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the proxy of a call of the module, which is a leaf of the symbolic trace of a module around it.

    Raises:
        TypeError: the module itself is traced.
    """
    tracer: Any = next(each for each in (*inputs, *kwargs.values()) if isinstance(each, Proxy)).tracer
    if tracer.root is module:
        raise what_to_trace()
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, kwargs)
