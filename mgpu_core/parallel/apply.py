"""Apply: each rank's module on its own inputs, in a worker thread per rank or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mgpu_core.devices.devices import DeviceLike
from mgpu_core.ranks.draws import Draws
from mgpu_core.ranks.random import check_rng
from mgpu_core.ranks.run import Run
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import in_span, span

__all__ = ["apply_to", "parallel_apply"]


def parallel_apply(
    modules: Sequence[torch.nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
    *,
    rng: str = "auto",
    workers: str = "threads",
) -> list[Any]:
    """Call ``modules[rank](*inputs[rank], **kwargs_tup[rank])`` on every rank at once.

    Args:
        modules: one per rank.
        inputs: per rank a tuple or list of positional arguments, or the only argument.
        kwargs_tup: per rank its keyword arguments.
        devices: per rank its device (default: that of its first tensor).
        rng: ``auto`` and ``per_rank``: each rank draws random numbers from a stream of its own, and one seed gives the
            same bits in every run.  Where nothing is drawn, ``auto`` leaves the caller's generator as it was.
        workers: ``threads``: several ranks run at once, each in its own thread; ``caller``: one after the other in the
            calling thread, which is faster where each launches little work.

    Returns:
        The outputs, in rank order.  A single rank runs in the calling thread, several in the team's workers, each
        under the caller's grad mode, inference mode, autocast, saved-tensor hooks, streams, a default device (its own
        where it is one of the team's) and a copy of its ``contextvars``.

    Raises:
        AssertionError: lists of different lengths, as in torch.
        ValueError: another ``rng`` or ``workers``.
        TypeError: the caller is inside a TorchFunctionMode or TorchDispatchMode that does not say
            ``mgpu_core_thread_safe = True``, or inside a transform of ``torch.func``.
        Exception: the first failing rank's, of the same type: ``Caught KeyError in replica 1 on device cuda:1.`` and
            the original traceback; the original is ``__cause__`` and the other ranks' failures are notes.
            ``KeyboardInterrupt`` and ``SystemExit`` pass through.
        Error: a rank did not end within ``MGPU_CORE_TIMEOUT`` seconds.
    """
    kwargs_tup = kwargs_tup if kwargs_tup is not None else [{}] * len(modules)
    _check_lengths(modules, inputs=inputs, kwargs_tup=kwargs_tup, devices=devices)
    check_rng(rng)
    if workers not in ("threads", "caller"):
        raise ValueError(f"workers must be 'threads' or 'caller', not {workers!r}")
    team = Team.of(_devices_of(inputs, devices))
    # Nothing is known of an earlier call of these modules.
    draws = Draws(rng, type(modules[0]).__name__ if modules else "")
    return apply_to(team, modules, inputs, kwargs_tup, draws=draws, workers=workers)


def apply_to(
    team: Team,
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]],
    *,
    draws: Draws,
    workers: str,
    form: Hashable = None,
) -> list[Any]:
    """Run :func:`parallel_apply` on validated arguments; see :meth:`mgpu_core.ranks.run.Run.run`."""
    calls: list[Callable[[], Any]] = []
    for rank, module in enumerate(modules):
        args = inputs[rank] if isinstance(inputs[rank], list | tuple) else (inputs[rank],)
        call = partial(module, *args, **kwargs_tup[rank])
        calls += (call if tracer.sink is None else partial(in_span, "forward", rank, team.devices[rank], call),)
    with NULL_CONTEXT if tracer.sink is None else span("apply"):
        return Run(team).run(calls, draws=draws, workers=workers, form=form)


def _check_lengths(modules: Sequence[Any], **others: Sequence[Any] | None) -> None:
    for name, other in others.items():
        if other is not None and len(modules) != len(other):
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to the number of {name} {len(other)}"
            )


def _devices_of(inputs: Sequence[Any], devices: Sequence[DeviceLike | None] | None) -> list[DeviceLike]:
    resolved: list[DeviceLike] = []
    for rank, args in enumerate(inputs):
        device = None if devices is None else devices[rank]
        if device is None:
            tensor = _first_tensor(args)
            if tensor is None:
                raise RuntimeError(
                    f"in replica {rank}, no device was provided and no tensor input was found; "
                    "device cannot be resolved"
                )
            device = tensor.device
        resolved.append(device)
    return resolved


def _first_tensor(obj: Any) -> torch.Tensor | None:
    if isinstance(obj, torch.Tensor):
        return obj
    if isinstance(obj, Mapping):
        obj = list(obj.values())
    if isinstance(obj, list | tuple):
        return next((tensor for each in obj if (tensor := _first_tensor(each)) is not None), None)
    return None
