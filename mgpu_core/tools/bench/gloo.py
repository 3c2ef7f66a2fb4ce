"""The peers of many processes: k real ones of `torch.distributed` on gloo, kept ready, so that they take turns with us.

They are spawned once for many rounds and wait on pipes; the parent triggers each repetition, which begins with gloo's
own barrier in the processes, and takes the slowest rank's time. Every wait has a limit, a process that dies is noticed
at once, and all are ended with the context.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from mgpu_core.support.interrupts import on_ctrl_c
from mgpu_core.tools.bench.gloo_worker import GLOO_SECONDS, MakeRank, Rank, WorkerConfig, serve

START_SECONDS = 180.0
"""Importing torch in many processes on few cores takes its time."""
ANSWER_SECONDS = 2 * GLOO_SECONDS
"""Longer than gloo's own limit, so that its error comes first."""
END_SECONDS = 5.0


class PeerFailed(Exception):
    """A process of the peer failed, died or did not answer."""


class GlooTeam:
    """The processes; a context manager.

    Args:
        ranks: how many processes.
        make_rank: a class at the top of a module, because it is sent by name; each process calls it with its config.
            Its methods are the orders: `prepare`, `run`, `wrong`, and `reset` where there is something to reset.
    """

    def __init__(self, ranks: int, make_rank: MakeRank = Rank) -> None:
        self._ranks, self._make_rank = ranks, make_rank
        self._seconds = START_SECONDS
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> "GlooTeam":
        self._folder = tempfile.TemporaryDirectory(prefix="mgpu-gloo-")
        try:
            for rank in range(self._ranks):
                self._start(rank)
            self._answers()
        except BaseException:
            self.close(0.0)  # they may be importing torch, and have nothing to lose
            raise
        self._seconds = ANSWER_SECONDS
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def prepare(self, *row: Any) -> None:
        """Let all ranks prepare a row; arguments as of their own `prepare`."""
        self._ask("prepare", *row)

    def reset(self) -> None:
        """Give all ranks fresh inputs."""
        self._ask("reset")

    def run(self) -> float:
        """Return the seconds of the slowest rank, from the barrier to its end."""
        seconds: list[float] = self._ask("run")
        return max(seconds)

    def wrong(self, salt: int) -> int:
        """Wrong values in all ranks."""
        return sum(self._ask("wrong", salt))

    def close(self, seconds: float = END_SECONDS) -> None:
        """End the processes: politely, then, after so many seconds, not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(END_SECONDS)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, locked
        threads = max(1, (os.cpu_count() or 1) // self._ranks)
        config = WorkerConfig(rank, self._ranks, str(Path(self._folder.name, "store")), threads)
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, config, self._make_rank), name=f"gloo {rank}", daemon=True
        )
        self._connections.append(ours)
        # Ctrl-C reaches every process. A child inherits the mask, and ignores the signal once it has imported torch.
        # Here another thread may take it: the child gets its orders all the same, and the exception comes later.
        # The tracker's start, which would unblock the signal again, comes first.
        resource_tracker.ensure_running()
        pressed: list[bool] = []
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with on_ctrl_c(lambda: pressed.append(True)):
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        theirs.close()
        if pressed:
            raise KeyboardInterrupt

    def _ask(self, *order: Any) -> list[Any]:
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(order)
            except OSError as error:
                raise PeerFailed(f"gloo: rank {rank} is gone ({error})") from error
        return self._answers()

    def _answers(self) -> list[Any]:
        """One answer per rank; raises `PeerFailed` as soon as one rank cannot give its own."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._seconds
        while len(answers) < len(self._connections):
            pending = {each: rank for rank, each in enumerate(self._connections) if rank not in answers}
            ends = [process.sentinel for process in self._processes]
            ready = wait([*pending, *ends], max(0.0, deadline - time.monotonic()))
            heard = [each for each in pending if each in ready]
            for connection in heard:
                answers[pending[connection]] = _receive(pending[connection], connection)
            if not heard:
                dead = [rank for rank, end in enumerate(ends) if end in ready]
                what = f"rank {dead[0]} died" if dead else f"no answer within {self._seconds:.0f} seconds"
                raise PeerFailed(f"gloo: {what}")
        return [answers[rank] for rank in range(self._ranks)]


def _receive(rank: int, connection: Connection) -> Any:
    try:
        kind, value = connection.recv()
    except (EOFError, OSError) as error:
        raise PeerFailed(f"gloo: rank {rank} died") from error
    if kind == "failed":
        raise PeerFailed(f"gloo: rank {rank}: {value}")
    return value
