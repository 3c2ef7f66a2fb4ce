"""One NCCL team per list of GPUs in a process, made at first use, because making communicators takes seconds.

NCCL sees each GPU once; ranks that share one are added there first.  A team that failed is dropped, so that the next
call makes a new one.

NCCL takes the driver's word that GPUs reach each other.  Where a test has shown otherwise, NCCL_P2P_DISABLE keeps it
off peer-to-peer; but NCCL reads that once, so after its first communicator in the process `auto` does without NCCL.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed

from mgpu_core import _core
from mgpu_core.devices.nccl_library import wheel_libraries
from mgpu_core.devices.time_limits import seconds_of
from mgpu_core.errors import NcclError

__all__ = [
    "TIMEOUT_VARIABLE",
    "keep_nccl_off_peers",
    "limit_of_collectives",
    "nccl_is_there",
    "nccl_is_trusted",
    "practice",
    "with_nccl",
]

TIMEOUT_VARIABLE = "MGPU_CORE_NCCL_TIMEOUT"
P2P_VARIABLE = "NCCL_P2P_DISABLE"

Devices = tuple[int, ...]
T = TypeVar("T")

_teams: dict[Devices, _core.NcclTeam] = {}
_of_parent: list[_core.NcclTeam] = []  # in a forked child: not ours to end
_lock = threading.Lock()
_practice_seconds: dict[Devices, float] = {}
_made_one = False  # a communicator, in this process
_trusted = True


def keep_nccl_off_peers() -> None:
    """Make NCCL stage through the host from its first communicator on; where that is too late, keep `auto` off NCCL.

    A value that the user has set stays. Any other than "1" keeps `auto` off NCCL too.
    """
    global _trusted
    if os.environ.setdefault(P2P_VARIABLE, "1") != "1" or _made_one or _torch_has_nccl():
        _trusted = False


def _torch_has_nccl() -> bool:
    """Return whether a process group of torch, the default one or another, has NCCL."""
    if not torch.distributed.is_available():
        return False
    groups = torch.distributed.distributed_c10d._world.pg_backend_config
    return any("nccl" in config for config in groups.values())


def nccl_is_trusted() -> bool:
    """Return whether `auto` may choose NCCL: it uses no peer-to-peer that a test has shown to be broken."""
    return _trusted


@contextmanager
def practice(devices: Sequence[int], seconds: float) -> Iterator[None]:
    """Use another team over these GPUs inside the block, and give its calls up after so many seconds.

    One thread at a time may be inside.
    """
    unique_devices = tuple(dict.fromkeys(devices))
    with _lock:
        usual = _teams.pop(unique_devices, None)
        _practice_seconds[unique_devices] = seconds
    try:
        yield
    finally:
        with _lock:
            del _practice_seconds[unique_devices]
            _teams.pop(unique_devices, None)  # it ends with its last owner
            if usual is not None:
                _teams[unique_devices] = usual


def nccl_is_there() -> bool:
    """Return whether NCCL can be opened here; opens it."""
    try:
        return bool(_core.nccl_open(wheel_libraries()))
    except _core.BackendUnavailable:
        return False


def with_nccl(devices: Sequence[int], call: Callable[[_core.NcclTeam], T]) -> T:
    """Call ``call(team)`` with the team over these GPUs, one entry per rank.

    Raises:
        BackendUnavailable: there is no NCCL that can be used; the message says why.
        NcclError: NCCL failed; a later call makes a new team.
        ValueError: ``MGPU_CORE_NCCL_TIMEOUT`` is not a positive number of seconds.
    """
    unique_devices = tuple(dict.fromkeys(devices))
    team = _team_over(unique_devices)
    try:
        return call(team)
    except NcclError:
        with _lock:
            if _teams.get(unique_devices) is team:  # another thread may have made the next one
                del _teams[unique_devices]
        raise


def limit_of_collectives() -> float:
    """Return the seconds after which a collective whose ranks wait for each other is given up.

    Raises:
        ValueError: ``MGPU_CORE_NCCL_TIMEOUT`` is not a positive number of seconds.
    """
    return seconds_of(TIMEOUT_VARIABLE, "600", 1e9)


def _team_over(unique_devices: Devices) -> _core.NcclTeam:
    global _made_one
    with _lock:
        team = _teams.get(unique_devices)
        if team is None:
            _core.nccl_open(wheel_libraries())
            _made_one = True
            ranks = list(range(len(unique_devices)))
            unique_id = _core.nccl_unique_id()
            limit = limit_of_collectives()
            seconds = min(limit, _practice_seconds.get(unique_devices, limit))
            team = _teams[unique_devices] = _core.nccl_init(
                unique_id, len(unique_devices), ranks, list(unique_devices), seconds
            )
        return team


def _close_all() -> None:
    """Close all communicators before the interpreter ends: later their driver may be gone."""
    while _teams:
        _teams.popitem()[1].close()


atexit.register(_close_all)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _of_parent.extend(_teams.values())
    _teams.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
