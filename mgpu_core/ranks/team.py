"""A team: the ordered ranks and their devices.

A rank is an index into the list, never a device: several ranks may share one, and a CPU tensor does not know its CPU
rank.  There is one team per distinct list in a process, so that wrappers over the same devices share
their worker threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.ranks.workers import WorkerPool

__all__ = ["Team"]

_REMEMBERED = 8  # teams of the functional forms, kept alive between two calls


class Team:
    """The ranks ``0 ... len(team) - 1`` and the device of each.  Use :meth:`of`.

    Attributes:
        devices: one ``torch.device`` per rank, each with its index (the CPU has none).
        ranks: ``range(len(team))``.
        on_host: all ranks are on the CPU, where there are no streams.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices = devices
        self.ranks = range(len(devices))
        self.on_host = {device.type for device in devices} == {"cpu"}
        self._workers: WorkerPool | None = None
        self._lock = threading.Lock()
        self._parts: dict[int, Team] = {}  # the teams of the first ranks that were asked for

    @staticmethod
    def of(devices: Sequence[DeviceLike] | Team) -> Team:
        """Return the team over these devices.

        Raises:
            TypeError, ValueError: an entry that is no device of this machine, or an empty list.
        """
        if isinstance(devices, Team):
            return devices
        known = _known(devices)
        return _find(as_devices(devices)) if known is None else known

    @staticmethod
    def of_lanes(count: int) -> Team:
        """Return the team of lanes that belong to no device: each goes to the devices that it works on."""
        return _find((torch.device("cpu"),) * count)

    def __len__(self) -> int:
        return len(self.devices)

    def __repr__(self) -> str:
        return f"Team({[str(device) for device in self.devices]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Team.of, ([str(device) for device in self.devices],)

    def first(self, count: int) -> Team:
        """Return the team of the first ``count`` ranks."""
        if count == len(self.devices):
            return self
        part = self._parts[count] = _find(self.devices[:count])
        return part

    @property
    def workers(self) -> WorkerPool:
        """The team's threads, made at first use; they end when the team is collected."""
        with self._lock:
            if self._workers is None:
                cpu_ranks = sum(device.type == "cpu" for device in self.devices)
                self._workers = WorkerPool("mgpu", len(self), cpu_ranks)
                weakref.finalize(self, self._workers.close)
            return self._workers

    def close(self) -> None:
        """End the idle worker threads now, those of its first ranks too.  A later call starts new ones."""
        if self._workers is not None:
            self._workers.close()
        for part in list(self._parts.values()):
            part.close()


_teams: weakref.WeakValueDictionary[tuple[torch.device, ...], Team] = weakref.WeakValueDictionary()
_recent: OrderedDict[tuple[torch.device, ...], Team] = OrderedDict()
_lock = threading.Lock()


def _known(devices: Sequence[DeviceLike]) -> Team | None:
    """Return the remembered team of exactly these devices: they were looked up when it was made."""
    if type(devices) is tuple or type(devices) is list:
        key: Any = tuple(devices)
        with _lock:
            try:
                team = _recent.get(key)
            except TypeError:  # an entry without a hash is no device
                return None
            if team is not None:
                _recent.move_to_end(key)
            return team
    return None


def _find(devices: tuple[torch.device, ...]) -> Team:
    with _lock:
        team = _teams.get(devices)
        if team is None:
            team = _teams[devices] = Team(devices)
        _recent[devices] = team
        _recent.move_to_end(devices)
        forgotten = _recent.popitem(last=False)[1] if len(_recent) > _REMEMBERED else None
    del forgotten  # outside the lock: its end runs code
    return team


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for team in list(_teams.values()):
        team._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
