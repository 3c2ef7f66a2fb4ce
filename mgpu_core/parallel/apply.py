"""Apply: each rank's module on its own inputs, in a worker thread per rank or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from operator import attrgetter
from threading import Event
from typing import Any

import torch

from mgpu_core.device.context import CallerContext
from mgpu_core.device.devices import DeviceLike
from mgpu_core.device.exceptions import raise_failures
from mgpu_core.device.global_flags import switches_kept
from mgpu_core.device.random import RankStream, check_rng, current_stream, rank_streams
from mgpu_core.device.rank_barrier import RankHandle, RankRendezvous
from mgpu_core.device.streams import caller_streams, on
from mgpu_core.device.team import Team
from mgpu_core.device.workers import Outcome, time_limit
from mgpu_core.errors import Error
from mgpu_core.module_tree import ModuleTree, draws_random_numbers
from mgpu_core.null_context import NULL_CONTEXT
from mgpu_core.trace.tracer import span

__all__ = ["apply_to", "draws_apart", "parallel_apply", "run_ranks", "shares_generator"]


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
        rng: ``auto``: ranks that share a random generator draw from streams of their own where a module looks as if it
            drew (dropout in training); ``per_rank``: always.  Then one seed gives the same bits in every run.
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
    return apply_to(team, modules, inputs, kwargs_tup, draws=_draws(team, modules, rng), workers=workers)


def apply_to(
    team: Team,
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]],
    *,
    draws: bool,
    workers: str,
) -> list[Any]:
    """Run :func:`parallel_apply` on validated arguments; see :func:`run_ranks`."""
    streams = caller_streams(team.devices)
    calls = [
        partial(_call, rank, modules[rank], inputs[rank], kwargs_tup[rank], team.devices[rank], streams[rank])
        for rank in range(len(modules))
    ]
    with span("apply"):
        return run_ranks(team, calls, draws=draws, workers=workers)


def run_ranks(
    team: Team,
    calls: Sequence[Callable[[], Any]],
    *,
    draws: bool,
    workers: str,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """Run the call of each rank and return the results in rank order.

    Args:
        team: the ranks.
        calls: one callable per rank, run on the rank's device and the caller's stream.
        draws: whether ranks that share a random generator must draw from streams of their own.
        workers: ``threads``, each rank in its own worker, the same one in every call; ``caller``, one after the other.
        names: of the ranks in messages, read after a failure; ``None``: ``replica 1 on device cuda:1``.

    Raises:
        Exception: as :func:`parallel_apply`.
    """
    if len(calls) == 1:
        outcomes = [_run_here(call) for call in calls]
    elif workers == "caller":
        outcomes = _run_in_caller(team, calls, draws and shares_generator(team))
    else:
        outcomes = _run_in_workers(team, calls, caller_streams(team.devices), draws and shares_generator(team))
    for outcome in outcomes:
        if outcome.error is not None:
            raise_failures(outcomes, names or [f"replica {rank} on device {team.devices[rank]}" for rank in team.ranks])
    return list(map(_value_of, outcomes))


_value_of = attrgetter("value")


def shares_generator(team: Team) -> bool:
    """Return whether ranks of the team share a device, and so its random generator."""
    return len(set(team.devices)) < len(team.devices)


def _run_in_caller(team: Team, calls: Sequence[Callable[[], Any]], draws: bool) -> list[Outcome]:
    """Run the ranks one after the other in this thread, each in its own context; the first failure ends it."""
    numbers = rank_streams(team.devices) if draws and team.devices.count(_CPU) > 1 else None
    outcomes: list[Outcome] = []
    for rank, call in enumerate(calls):
        outcome = Outcome()
        outcomes += (outcome,)
        try:
            if numbers is not None:
                call = _drawing(call, numbers[rank])
            outcome.value = copy_context().run(call)
        except Exception as error:
            outcome.error = error
            break
    return outcomes


def _check_lengths(modules: Sequence[Any], **others: Sequence[Any] | None) -> None:
    for name, other in others.items():
        if other is not None and len(modules) != len(other):
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to the number of {name} {len(other)}"
            )


def _devices_of(inputs: Sequence[Any], devices: Sequence[DeviceLike | None] | None) -> list[DeviceLike]:
    found: list[DeviceLike] = []
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
        found.append(device)
    return found


def _first_tensor(obj: Any) -> torch.Tensor | None:
    if isinstance(obj, torch.Tensor):
        return obj
    if isinstance(obj, Mapping):
        obj = list(obj.values())
    if isinstance(obj, list | tuple):
        return next((tensor for each in obj if (tensor := _first_tensor(each)) is not None), None)
    return None


def _call(
    rank: int,
    module: torch.nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    device: torch.device,
    stream: torch.Stream | None,
) -> Any:
    if not isinstance(args, list | tuple):
        args = (args,)
    with on(device, stream), span("forward", rank, device):
        return module(*args, **kwargs)


def _run_here(call: Callable[[], Any]) -> Outcome:
    outcome = Outcome()
    try:
        outcome.value = call()
    except Exception as error:
        outcome.error = error
    return outcome


def draws_apart(tree: ModuleTree, rng: str) -> bool:
    """Return whether ranks that share a generator must be kept apart; inside a rank that is, its own ranks are."""
    return rng == "per_rank" or current_stream() is not None or tree.draws_random_numbers()


def _draws(team: Team, modules: Sequence[torch.nn.Module], rng: str) -> bool:
    """Return the same of modules that were not read yet."""
    if not shares_generator(team):
        return False
    if rng == "per_rank" or current_stream() is not None:
        return True
    replicas = getattr(modules[0], "_is_replica", False)  # all alike
    looked_at = [each for each in modules if isinstance(each, torch.nn.Module)]
    return any(draws_random_numbers(each) for each in (looked_at[:1] if replicas else looked_at))


def _run_in_workers(
    team: Team, calls: Sequence[Callable[[], Any]], streams: Sequence[torch.Stream | None], draws: bool
) -> list[Outcome]:
    context = CallerContext(team.devices)
    seconds = time_limit()
    turns = _turns(team, context.serialize, draws)
    rendezvous = RankRendezvous(team.devices, streams, seconds, serialize=bool(turns))
    tasks = [context.bind(partial(_attended, rendezvous, rank, call), rank) for rank, call in enumerate(calls)]
    if draws and team.devices.count(_CPU) > 1:
        tasks = list(map(_drawing, tasks, rank_streams(team.devices)))
    for ranks in turns:
        _take_turns(tasks, ranks, seconds)
    with switches_kept(), team.workers.lease() as crew:
        return crew.run(tasks, seconds)


def _turns(team: Team, all_in_turns: bool, draws: bool) -> list[list[int]]:
    """Return groups of ranks that must take turns: all, or those that share an accelerator and its generator."""
    if all_in_turns:
        return [list(team.ranks)]
    if not draws:
        return []
    shared = [[rank for rank in team.ranks if team.devices[rank] == each] for each in set(team.devices) - {_CPU}]
    return [ranks for ranks in shared if len(ranks) > 1]


def _attended(rendezvous: RankRendezvous, rank: int, call: Callable[[], Any]) -> Any:
    with RankHandle(rendezvous, rank):
        return call()


_CPU = torch.device("cpu")


def _drawing(task: Callable[[], Any], stream: RankStream | None) -> Callable[[], Any]:
    def work() -> Any:
        with stream.entered() if stream is not None else NULL_CONTEXT:
            return task()

    return work


def _take_turns(tasks: list[Callable[[], Any]], ranks: Sequence[int], seconds: float) -> None:
    """Let the tasks of ``ranks`` run one after the other: each waits until the one before has ended, or failed."""
    before: Event | None = None
    for rank in ranks:
        tasks[rank], before = _after(before, tasks[rank], seconds)


def _after(before: Event | None, task: Callable[[], Any], seconds: float) -> tuple[Callable[[], Any], Event]:
    ended = Event()

    def work() -> Any:
        try:
            if before is not None and not before.wait(seconds):
                raise Error(f"the rank before did not end within {seconds:g} s")
            return task()
        finally:
            ended.set()

    return work, ended
