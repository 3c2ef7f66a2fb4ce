"""One of the processes of a peer on gloo: a rank of a real `torch.distributed` group, at the parent's command.

It is started by `gloo.py`, waits on its pipe without using the CPU, and ends when the parent does. Orders are tuples
(name of a method, arguments); answers are ("done", value) or ("failed", text). Whose methods they are is the parent's
choice: `Rank` does collectives, `ddp_worker` trains.
"""

import datetime
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from mgpu_core.tools.bench.collective import Holding, TeamCase, TeamTask

GLOO_SECONDS = 60.0
"""How long a collective may take before gloo gives it up."""


@dataclass(frozen=True)
class WorkerConfig:
    """Which of how many ranks, the file they meet at, and torch's threads in this process."""

    rank: int
    ranks: int
    store: str
    threads: int


MakeRank = Callable[[WorkerConfig], Any]
"""From a config, in a group that has been joined, to an object whose methods are the orders."""


def serve(connection: Connection, config: WorkerConfig, make_rank: MakeRank) -> None:
    """Join the group, then carry out orders until one is None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends us
    try:
        torch.set_num_threads(config.threads)
        _join(config)
        rank = make_rank(config)
        connection.send(("done", None))
        while (order := connection.recv()) is not None:
            name, *arguments = order
            connection.send(("done", getattr(rank, name)(*arguments)))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))


class TrainingRank:
    """A process that trains; others say how it makes a step."""

    def step(self) -> None:
        """Make the steps of one turn, to their end."""
        raise NotImplementedError

    def run(self) -> float:
        """Return the seconds of one turn, from the barrier to this rank's end."""
        distributed.barrier()
        begin = time.perf_counter()
        self.step()
        return time.perf_counter() - begin


class Rank:
    """The orders of the collectives' cases, as methods."""

    def __init__(self, config: WorkerConfig) -> None:
        self._rank = config.rank

    def prepare(self, collective: str, task: TeamTask) -> None:
        """Make the buffers of a row of that case."""
        table = importlib.import_module("mgpu_core.tools.bench.cases.collectives").COLLECTIVES
        self._collective: TeamCase = table[collective]
        self._holding = Holding(self._collective, task, [self._rank])
        self._tiny = Holding(self._collective, task.tiny(), [self._rank])

    def reset(self) -> None:
        """Fresh inputs."""
        self._holding.reset()

    def run(self) -> float:
        """Return the seconds from the barrier to this rank's end; before it, as everybody, once on next to nothing."""
        self._work(self._tiny)
        distributed.barrier()
        begin = time.perf_counter()
        self._work(self._holding)
        return time.perf_counter() - begin

    def wrong(self, salt: int) -> int:
        """Wrong values of this rank's result."""
        return self._holding.wrong(lambda: [self._work(self._holding)], salt)

    def _work(self, holding: Holding) -> torch.Tensor | None:
        return self._collective.gloo(holding.task, self._rank, holding.sends[0])


def _join(config: WorkerConfig) -> None:
    # Without this gloo looks up the host's name, which on some machines is slow or leads to another interface.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(config.store, config.ranks),  # type: ignore[attr-defined]
        rank=config.rank,
        world_size=config.ranks,
        timeout=datetime.timedelta(seconds=GLOO_SECONDS),
    )
