"""The messages of one update, in the same order in all processes, whatever order their buckets become ready in.

All buckets but the last travel while backward goes on.  The last one waits for the end of all ranks' backward, since
it carries the process's ballot; when it has come back, every process knows whether all of them will update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mgpu_core.processes.ballot import Ballot, Tally, read, tail_count, write
from mgpu_core.processes.group import Processes

if TYPE_CHECKING:
    from torch.distributed import Work

__all__ = ["Outbox"]


class Outbox:
    """One process's messages.

    Args:
        processes: who gets them.
        messages: one flat tensor per bucket, summed in place; the last one has room for a ballot at its end.
        parameters: how many a ballot tells of.
        comm_dtype: the dtype of messages in transit; ``None``: their own.
    """

    def __init__(
        self, processes: Processes, messages: Sequence[torch.Tensor], parameters: int, comm_dtype: torch.dtype | None
    ) -> None:
        self._processes, self._messages, self._comm_dtype = processes, messages, comm_dtype
        self._words = tail_count(processes.count, parameters)
        self._lock = threading.Lock()
        self.open(None)

    def open(self, send: Callable[[int], None] | None) -> None:
        """Begin the messages of an update; ``send`` sums a bucket over all processes instead, except for the ballot."""
        self._send_bucket = send
        self._ready: set[int] = set()
        self._next = 0
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Work | None]] = []
        self.is_cast = False
        """Whether the ballot has left: from then on the others may update."""

    def put(self, bucket: int) -> None:
        """Send a bucket as soon as those before it have left; in any thread."""
        last = len(self._messages) - (self._send_bucket is None)
        with self._lock:
            self._ready.add(bucket)
            while self._next in self._ready and self._next < last:
                self._send(self._next)

    def has_sent(self, bucket: int) -> bool:
        """Return whether it has left."""
        return bucket < self._next

    def _send(self, bucket: int) -> None:
        self._next = bucket + 1
        if self._send_bucket is None:
            self._post(self._messages[bucket])
            return
        try:
            self._send_bucket(bucket)
        except BaseException as error:
            self._processes.lost = (
                f"a communication hook failed in process {self._processes.index} ({type(error).__name__}), and what it "
                "has sent is not known: start all processes again from the last checkpoint"
            )
            raise

    def _post(self, message: torch.Tensor) -> None:
        dtype = self._comm_dtype
        sent = message if dtype is None or message.is_complex() else message.to(dtype)
        self._under_way.append((message, sent, self._processes.add_up(sent)))

    def cast(self, ballot: Ballot, interrupted: Callable[[], bool]) -> Tally:
        """Send the remaining buckets and the ballot; return all processes' ballots when the sums are there.

        Raises:
            Error: a process is gone.
            KeyboardInterrupt: ``interrupted`` returned True; the state of the other processes is unknown.
        """
        alone = self._send_bucket is not None or not self._messages
        while self._next < len(self._messages) - (not alone):
            self._send(self._next)
        tail = torch.zeros(self._words, device=self._processes.device) if alone else self._messages[-1][-self._words :]
        write(tail, ballot, self._processes.index, self._processes.count)
        self.is_cast = True
        self._post(tail if alone else self._messages[-1])
        for message, sent, work in self._under_way:
            self._processes.wait(work, interrupted)
            if sent is not message:
                message.copy_(sent)
        self._under_way, self._send_bucket = [], None
        return read(tail, self._processes.count)
