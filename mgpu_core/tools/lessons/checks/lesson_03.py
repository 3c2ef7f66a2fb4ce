"""Lesson 3, apply."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_Apply = Callable[[list[Callable[[Any], Any]], list[Any]], Any]
_MEETING_SECONDS = 2.0


@asks_for("apply_all")
def exercise_1(answer: _Apply) -> None:
    """Check: at once, in order, and careful with failures; also more at once than a pool has workers by default."""
    for ranks in (1, 2, 3, 8):
        _check_meeting(answer, ranks)
        _check_order(answer, ranks)
        _check_failures(answer, ranks, range(max(0, ranks - 2), ranks))
        _check_failures(answer, ranks, range(min(2, ranks)))
    _check_meeting(answer, max(32, os.cpu_count() or 1) + 1)  # min(32, cores + 4) workers in one kind of pool, or cores


def _check_meeting(answer: _Apply, ranks: int) -> None:
    """Check: everybody waits for everybody: only possible at once."""
    barrier = threading.Barrier(ranks, timeout=_MEETING_SECONDS)

    def meet(x: int) -> int:
        barrier.wait()
        return x

    try:
        got = answer([meet] * ranks, list(range(ranks)))
    except threading.BrokenBarrierError:
        raise WrongAnswer(
            f"apply_all, {ranks} functions that wait for each other: they were not all running at once"
        ) from None
    expect(f"apply_all, {ranks} functions that return their input", got, list(range(ranks)))


def _check_order(answer: _Apply, ranks: int) -> None:
    """Check: the higher the rank, the earlier it ends."""
    ended = [threading.Event() for _ in range(ranks + 1)]
    ended[ranks].set()

    def end_after_the_next(rank: int) -> str:
        ended[rank + 1].wait(_MEETING_SECONDS)
        ended[rank].set()
        return f"of rank {rank}"

    got = answer([end_after_the_next] * ranks, list(range(ranks)))
    expect(f"apply_all, {ranks} ranks of which the last ends first", got, [f"of rank {rank}" for rank in range(ranks)])


def _check_failures(answer: _Apply, ranks: int, failing: range) -> None:
    """Check: two ranks fail at once, the others take their time; all must have ended before anything is raised."""
    errors = {rank: KeyError(f"of rank {rank}") for rank in failing}
    ended: list[int] = []

    def work(rank: int) -> None:
        if rank in errors:
            raise errors[rank]
        time.sleep(0.1)
        ended.append(rank)

    call = f"apply_all, {ranks} ranks of which {list(failing)} fail"
    try:
        got = answer([work] * ranks, list(range(ranks)))
    except KeyError as error:
        if error is not errors[failing[0]]:
            raise WrongAnswer(f"{call}: expected the exception of rank {failing[0]} itself, got {error!r}") from None
    else:
        raise WrongAnswer(f"{call}: expected a KeyError, got {got!r}")
    if len(ended) != ranks - len(failing):
        raise WrongAnswer(f"{call}: it raised while other ranks were still running: join all of them first")


_variable: ContextVar[str] = ContextVar("a variable of the checker", default="the default")


def _settings(*args: int, **kwargs: int) -> tuple[object, ...]:
    on = torch.is_autocast_enabled("cpu")
    return torch.is_grad_enabled(), on, torch.get_autocast_dtype("cpu") if on else None, _variable.get(), args, kwargs


@asks_for("carry")
def exercise_2(answer: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Check: the settings of the maker, in another thread, after the maker has left them."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):  # settings that the answer leaves set end here
        _check_carry(answer)


def _check_carry(answer: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for grad in (True, False):
        for dtype in (None, torch.bfloat16, torch.float16):
            wanted, carried = _under(grad, dtype, "set by the caller", lambda: (_settings(1, key=2), answer(_settings)))
            call = partial(carried, 1, key=2)
            for _ in range(2):
                got = _in_a_thread(call)
                expect("carry: (grad, autocast, its dtype, a context variable, arguments) in a thread", got, wanted)
            expect("carry: the same in the calling thread, later", call(), wanted)
            opposite = not grad, None if dtype else torch.bfloat16, "set by the thread"
            got = _in_a_thread(partial(_under, *opposite, call))
            expect("carry: the same in a thread whose own settings are the opposite", got, wanted)
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        raise WrongAnswer("carry: it changes the settings of the thread that it is called in, and leaves them so")


def _under(grad: bool, dtype: torch.dtype | None, text: str, function: Callable[[], Any]) -> Any:
    """Return the function's result under these settings; autocast is off without a dtype."""
    token = _variable.set(text)
    try:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return function()
    finally:
        _variable.reset(token)


def _in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


_TIMES: tuple[tuple[list[float], list[float], str], ...] = (  # of threads, of the caller, and which of them is faster
    ([9, 2, 2, 2], [9, 3, 3, 3], "threads"),
    ([9, 3, 3, 3], [9, 2, 2, 2], "caller"),
    ([9, 1], [3, 3], "threads"),
    ([5, 2, 200, 2], [5, 3, 3, 3], "threads"),
    ([5, 1, 4, 4], [5, 3, 3, 3], "caller"),
    ([9, 3], [9, 3], "threads"),
)


@asks_for("faster_way")
def exercise_3(answer: Callable[[Callable[[str], float], int], Any]) -> None:
    """Check: given times: a slow first call, one slow call, one lucky call, a tie; and in turns."""
    for threads, caller, wanted in _TIMES:
        times, asked = {"threads": threads, "caller": caller}, list[str]()

        def seconds_of(way: str, times: dict[str, list[float]] = times, asked: list[str] = asked) -> float:
            asked.append(way)
            return times[way][min(asked.count(way), len(times[way])) - 1]

        samples = len(threads) - 1
        call = f"faster_way, with the times {times}, {samples} samples"
        expect(call, answer(seconds_of, samples), wanted)
        expect(f"{call}: the ways that it asks for", asked, ["threads", "caller"] * (samples + 1))
