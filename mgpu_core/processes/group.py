"""The processes of one training, over a group of ``torch.distributed``: messages between them, and which are gone.

Everything is sent without blocking, and waited for in slices, so that Ctrl-C comes through; the group's own timeout
bounds each wait.  Whatever goes wrong on the way means that a process is lost: an error names it where that can be
seen, and from then on the group is not used any more.
"""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import distributed

from mgpu_core.device.memory import note_written
from mgpu_core.device.tensor_checks import bytes_of
from mgpu_core.errors import Error

if TYPE_CHECKING:  # a torch built without it has none
    from torch.distributed import ProcessGroup, Work

__all__ = ["Processes"]

_SLICE = timedelta(seconds=0.2)  # how long Ctrl-C may have to wait
_DYING_SECONDS = 1.0  # a process closes its connections a little before it has ended


class Processes:
    """The processes of a group, seen from one of them.

    Args:
        group: of ``torch.distributed``; all of its processes make a ``Processes`` of it at the same time.
        device: of this process, for messages that are not the caller's own tensors.

    Attributes:
        group: the same.
        index, count: which process this is, of how many.
        device: for messages of its own.
        lost: why the group cannot be used any more; ``None`` while it can.

    Raises:
        TypeError, ValueError: not an initialised group, or one that this process does not belong to.
        Error: a process is gone.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        _check(group)
        self.group = group
        self.index, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        self.lost: str | None = None
        self.device = torch.device("cpu") if distributed.get_backend(group) == "gloo" else device
        self._homes: list[list[Any]] = []
        self._homes = self.exchange("where they are", [_host(), os.getpid()])

    def add_up(self, tensor: torch.Tensor) -> Work | None:
        """Begin the sum of a tensor over all processes, in place; :meth:`wait` for it before it is read or written.

        On a GPU the current stream does so, and the host goes on: ``None``.
        """
        return self._begun(partial(distributed.all_reduce, tensor), tensor.device)

    def wait(self, work: Work | None, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Until it is done.

        Args:
            work: the pending operation; ``None``: a stream waits already.
            interrupted: whether to give up, where Ctrl-C is only noted.

        Raises:
            Error: a process is gone, or the group's timeout has passed.
            KeyboardInterrupt: ``interrupted`` said so.
        """
        if work is None:
            return
        while not work.is_completed():
            if interrupted():
                raise KeyboardInterrupt
            with suppress(RuntimeError):  # a slice has passed; what has really failed, is completed and says so below
                work.wait(_SLICE)
        try:
            work.wait()
        except RuntimeError as error:
            self._lose(error)

    def exchange(self, topic: str, value: Any, interrupted: Callable[[], bool] = lambda: False) -> list[Any]:
        """Return each process's value, in process order; values must be JSON.

        Args:
            topic: the subject, the same in all processes.
            value: this process's.
            interrupted: as for :meth:`wait`.

        Raises:
            Error: a process is gone, or talks about something else.
            KeyboardInterrupt: then the group cannot be used any more, since the others' words are still under way.
        """
        try:
            return self._exchange(topic, json.dumps(value).encode(), interrupted)
        except KeyboardInterrupt:
            self.lost = (
                f"process {self.index} of {self.count} was interrupted while the processes spoke about {topic}: start "
                "all of them again from the last checkpoint"
            )
            raise

    def _exchange(self, topic: str, words: bytes, interrupted: Callable[[], bool]) -> list[Any]:
        head = torch.tensor([len(words), zlib.crc32(topic.encode())], device=self.device)
        heads = [each.tolist() for each in self._all_gather(head, interrupted)]
        if any(each[1] != heads[self.index][1] for each in heads):
            self.lost = (
                f"process {self.index} of {self.count} spoke about {topic}, and others about something else: all "
                "processes must call the same methods of a step; start all of them again"
            )
            raise Error(self.lost)
        text = torch.frombuffer(bytearray(words), dtype=torch.uint8).to(self.device)
        room = max(count for count, _ in heads)
        texts = self._all_gather(torch.nn.functional.pad(text, (0, room - len(words))), interrupted)
        return [json.loads(bytes(each[:count].tolist())) for each, (count, _) in zip(texts, heads, strict=True)]

    def send_from(self, root: int, tensors: Sequence[torch.Tensor]) -> None:
        """Give all processes the values that process ``root`` has in these tensors."""
        single = [_without_repeats(each.detach()) for each in tensors if each.numel()]
        sent = [each.contiguous() for each in single]
        global_root = distributed.get_global_rank(self.group, root)
        for each in sent:
            message = bytes_of(each)  # any dtype
            self.wait(self._begun(partial(distributed.broadcast, message, global_root), message.device))
        if self.index == root:
            return
        for tensor, message in zip(single, sent, strict=True):
            if not tensor.is_contiguous():  # else the message is the tensor's own memory
                tensor.copy_(message)
        note_written(tensors)

    def _all_gather(self, tensor: torch.Tensor, interrupted: Callable[[], bool]) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        self.wait(self._begun(partial(distributed.all_gather, found, tensor), tensor.device), interrupted)
        return found

    def _begun(self, collective: Callable[..., Work | None], device: torch.device) -> Work | None:
        if self.lost is not None:
            raise Error(self.lost)
        try:
            work = collective(group=self.group, async_op=True)
            assert work is not None  # only those outside the group get nothing
            if device.type != "cuda":
                return work
            # An order between streams: later work of the stream waits.  Not by slices: NCCL gives a
            # communicator up whose wait has timed out.
            work.wait()
        except RuntimeError as error:
            if isinstance(error, distributed.DistBackendError) or "onnection" in str(error):
                self._lose(error)
            raise  # a mistake of this process: what it wanted to send cannot be sent
        return None

    def _lose(self, error: RuntimeError) -> NoReturn:
        found = self._ended()
        deadline = time.monotonic() + _DYING_SECONDS
        while not found and time.monotonic() < deadline:
            time.sleep(0.02)
            found = self._ended()
        who = " and ".join(found) or "a process on another machine, or one that is still running,"
        self.lost = (
            f"process {self.index} of {self.count} was left alone: {who} did not answer any more "
            f"({str(error).splitlines()[0]}); parameters are those of the last update: start all processes again from "
            "the last checkpoint"
        )
        raise Error(self.lost) from error

    def _ended(self) -> list[str]:
        here = _host()
        return [
            f"process {index} (pid {pid} on this machine, which has ended)"
            for index, (host, pid) in enumerate(self._homes)
            if host == here and index != self.index and _has_ended(pid)
        ]


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in which each element of an expanded tensor stands once."""
    return tensor[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()])]


def _check(group: Any) -> None:
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError("process_group needs torch.distributed.init_process_group() before; torchrun does not call it")
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process does not belong to process_group")
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            "process_group must be a group of torch.distributed, such as torch.distributed.group.WORLD, not "
            f"{type(group).__name__}"
        )


def _host() -> str:
    """Return an identifier of the machine and pid namespace, inside which pids are unique."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _has_ended(pid: int) -> bool:
    """Also of one whose parent has not asked yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self/stat").exists()
    return state in "ZX"
