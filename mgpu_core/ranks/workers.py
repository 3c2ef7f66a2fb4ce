"""Threads that wait for work: one per rank, made once, used by every forward.

A :class:`WorkerPool` lends *crews*, one worker per rank.  A call that finds no idle crew, because another thread is in
a forward or because it is itself made from a worker, gets a new one: no worker waits for a worker of its own team.

How the threads end.  A plain daemon thread inside a torch operation aborts the interpreter at exit; a plain non-daemon
one keeps it alive.  So they are daemons that are told to stop, and joined with a limit, before the interpreter starts
to go down.  A forked child has none of its parent's threads: its pools forget them and start new ones.
"""

from __future__ import annotations

import atexit
import os
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import Any

import torch

from mgpu_core.errors import Error

__all__ = ["Crew", "Outcome", "WorkerPool"]

IDLE_SECONDS = 5.0  # a crew that is idle for longer ends when another one comes back
EXIT_SECONDS = 4.0  # how long the end of the process waits for workers that are still in somebody's forward
FIRST_WAKE, LAST_WAKE = 0.001, 0.1  # seconds that an idle worker sleeps on a free-threaded build; doubled each time


class Outcome:
    """The outcome of a task: its value, or the exception that ended it."""

    value: Any = None
    error: BaseException | None = None


class _AtWork:
    """Those of a call that are still at work.  The last one to end wakes the caller, who would else wake for each."""

    __slots__ = ("_at_work", "_nobody")

    def __init__(self, indices: Iterable[int]) -> None:
        self._at_work = set(indices)
        self._nobody: SimpleQueue[None] = SimpleQueue()

    def ended(self, index: int) -> None:
        self._at_work.discard(index)
        if not self._at_work:
            self._nobody.put(None)

    def wait(self, seconds: float) -> list[int]:
        """Wait for all of them; return those that have not ended in that time."""
        if self._at_work:
            with suppress(Empty):
                self._nobody.get(timeout=seconds)
        return sorted(self._at_work.copy())


class _Job:
    __slots__ = ("index", "outcome", "ranks", "task")

    def __init__(self, task: Callable[[], Any], index: int, ranks: _AtWork) -> None:
        self.task: Callable[[], Any] | None = task
        self.index, self.ranks = index, ranks
        self.outcome = Outcome()

    def run(self) -> None:
        task, self.task = self.task, None
        assert task is not None
        try:
            self.outcome.value = task()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: the caller raises them
            self.outcome.error = error


_FREES_LATE = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def _next_job(inbox: SimpleQueue[_Job | None]) -> _Job | None:
    """Wait for a job; on a free-threaded build, wake now and then to free memory.

    On such a build an object is freed by the thread that made it, when that thread runs again (cpython#157838).  A
    worker that sleeps until its next job keeps the outputs of its last one, also after the caller has dropped them.
    """
    if not _FREES_LATE:
        return inbox.get()
    seconds = FIRST_WAKE
    while True:
        try:
            return inbox.get(timeout=seconds)
        except Empty:
            seconds = min(2 * seconds, LAST_WAKE)


def _serve(inbox: SimpleQueue[_Job | None]) -> None:
    while (job := _next_job(inbox)) is not None:
        job.run()
        ranks, index = job.ranks, job.index
        del job  # before the caller hears of it: a result must not live longer than the caller keeps it
        ranks.ended(index)


class _WorkerThread(threading.Thread):
    """Known by its class, so that the end of the process finds it."""


class _Worker:
    def __init__(self, name: str) -> None:
        self.inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self.thread = _WorkerThread(target=_serve, args=(self.inbox,), name=name, daemon=True)
        # Also without a call to stop it: Ctrl-C before its crew is lent, or another thread that could not be started.
        weakref.finalize(self, self.inbox.put, None).atexit = False
        Context().run(self.thread.start)  # an empty one: Python 3.14t gives a thread the variables of its maker


class Crew:
    """One worker per rank.  Lent to one call at a time."""

    def __init__(self, name: str, count: int) -> None:
        self.idle_since = 0.0
        # In a forked child the first to reach autograd's engine makes it anew, without a lock: not two workers at once.
        torch.autograd._is_checkpoint_valid()
        self.workers = [_Worker(f"{name}-rank{rank}") for rank in range(count)]
        self._share = 0

    def run(self, tasks: Sequence[Callable[[], Any]], seconds: float) -> list[Outcome]:
        """Run task i on worker i, all at once, and wait for all of them.

        Raises:
            Error: a rank did not end in time.  The crew is then unusable.
        """
        jobs, wait = self._begin(tasks)
        if missing := wait(seconds):
            raise Error(
                f"rank {missing[0]} did not end within {seconds:g} s ({len(missing)} of {len(jobs)} ranks are "
                "still at work); MGPU_CORE_TIMEOUT sets the limit. The next call starts new workers."
            )
        return [job.outcome for job in jobs]

    def serve(self, tasks: Sequence[Callable[[], Any]]) -> Callable[[float], list[int]]:
        """Begin task i on worker i, after which the crew ends; for tasks that raise nothing.

        Returns:
            A function that waits up to so many seconds, and returns the indices of tasks that have not ended.
        """
        _, wait = self._begin(tasks)
        self.stop()
        return wait

    def _begin(self, tasks: Sequence[Callable[[], Any]]) -> tuple[list[_Job], Callable[[float], list[int]]]:
        ranks = _AtWork(range(len(tasks)))
        jobs = [_Job(task, index, ranks) for index, task in enumerate(tasks)]
        for worker, job in zip(self.workers, jobs, strict=False):
            worker.inbox.put(job)
        return jobs, ranks.wait

    def stop(self) -> None:
        """Let each worker end after its task."""
        for worker in self.workers:
            worker.inbox.put(None)

    def share(self, threads: int, cpu_ranks: int) -> None:
        """Divide the intra-op threads of the caller among ranks that compute at once, unless that has been done."""
        # torch's number of threads is one setting of the process, which every thread takes over at its first parallel
        # operation and then keeps.  So each worker sets its share and takes it over at once, and a thread of its own
        # puts the process's setting back: neither the main thread nor later threads notice.
        share = max(1, threads // cpu_ranks) if cpu_ranks else self._share
        if share == self._share:
            return
        with _share_lock:
            everyone = _in_a_new_thread(torch.get_num_threads)
            try:
                self.run([lambda: _latch(share)] * len(self.workers), EXIT_SECONDS * 5)
            except BaseException:  # Ctrl-C, say: who has not set its share yet, does it later
                for index, worker in enumerate(self.workers):
                    worker.inbox.put(_Job(lambda: _latch(everyone), index, _AtWork(())))
                raise
            finally:
                _in_a_new_thread(lambda: _latch(everyone))
        self._share = share


_share_lock = threading.Lock()


def _in_a_new_thread(work: Callable[[], int]) -> int:
    """Return the result of the work in a thread that has taken over no setting yet."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join()
    return results[0]


def _latch(threads: int) -> int:
    torch.set_num_threads(threads)
    return torch.get_num_threads()


class WorkerPool:
    """The crews of one team.  Its owner keeps it alive; when the owner is collected, the threads end.

    Args:
        name: of the threads, for debuggers and traces.
        count: ranks of the team.
        cpu_ranks: how many of them compute on the CPU and share its cores.
    """

    def __init__(self, name: str, count: int, cpu_ranks: int) -> None:
        self._name, self._count, self._cpu_ranks = name, count, cpu_ranks
        self._forget()
        _pools[id(self)] = self

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Crew] = []
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._closed = 0  # how often close() was called: a crew lent before the last one does not come back

    @contextmanager
    def lease(self, at_once: int | None = None) -> Iterator[Crew]:
        """Return a crew for one call; those on the CPU, or so many at once, share the caller's intra-op threads.

        One that was left at work (Ctrl-C, time limit) ends after its tasks.
        """
        with self._lock:
            crew = self._idle.pop() if self._idle else None
            closed = self._closed
        if crew is None:
            crew = Crew(self._name, self._count)
            with self._lock:
                self._threads.update(worker.thread for worker in crew.workers)
        try:
            crew.share(torch.get_num_threads(), self._cpu_ranks if at_once is None else at_once)
            yield crew
        except BaseException:
            crew.stop()
            raise
        self._take_back(crew, closed)

    def _take_back(self, crew: Crew, closed: int) -> None:
        now = time.monotonic()
        with self._lock:
            crew.idle_since = now
            retired = [each for each in self._idle if now - each.idle_since > IDLE_SECONDS]
            self._idle = [each for each in self._idle if now - each.idle_since <= IDLE_SECONDS]
            if closed == self._closed:
                self._idle.append(crew)
            else:
                retired.append(crew)
        for retired_crew in retired:
            retired_crew.stop()

    def close(self) -> None:
        """Send the idle threads home now and the others after their call; the next call makes new ones."""
        with self._lock:
            self._closed += 1
            idle, self._idle = self._idle, []
        for crew in idle:
            crew.stop()

    def threads(self) -> list[threading.Thread]:
        """Return the threads that are alive."""
        with self._lock:
            return [thread for thread in self._threads if thread.is_alive()]


_pools: weakref.WeakValueDictionary[int, WorkerPool] = weakref.WeakValueDictionary()


def _alive() -> list[WorkerPool]:
    """Return all pools; another thread may make one meanwhile, which would break a loop over the dictionary."""
    return [pool for ref in _pools.valuerefs() if (pool := ref()) is not None]


def _stop_all() -> None:
    for pool in _alive():
        pool.close()
    until = time.monotonic() + EXIT_SECONDS
    for thread in threading.enumerate():  # also those whose pool or crew is gone, and which are still at work
        if isinstance(thread, _WorkerThread) and thread.is_alive():  # not one whose start was cut off
            thread.join(max(0.0, until - time.monotonic()))


def _after_fork_in_child() -> None:
    global _share_lock
    _share_lock = threading.Lock()
    for pool in _alive():
        pool._forget()


# Before the interpreter joins its threads and freezes the daemons; atexit alone would come after that.
getattr(threading, "_register_atexit", atexit.register)(_stop_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
