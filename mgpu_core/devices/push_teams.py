"""One team of push per list of GPUs in a process, made at first use, with the memory in which its ranks meet.

A team that failed serves no more, so that the next call makes a new one.  But no team ends with its memory: a kernel
that comes late writes there.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

import torch

from mgpu_core import _core
from mgpu_core.devices import streams as streams_of_devices
from mgpu_core.errors import BackendUnavailable, Error

__all__ = ["with_push"]

_teams: dict[tuple[int, ...], _core.PushTeam] = {}
_kept: list[tuple[_core.PushTeam, list[torch.Tensor]]] = []  # all teams, also those that failed
_lock = threading.Lock()


def with_push(streams: list[_core.Stream], call: Callable[[_core.PushTeam], None]) -> None:
    """Call ``call(team)`` with the team over the GPUs of these streams, one per rank.

    Raises:
        BackendUnavailable: these ranks cannot push; the message says why.
        Error: a rank gave up its wait for another in an earlier call; a later call makes a new team.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        raise BackendUnavailable("push needs launches that do not wait for each other: unset CUDA_LAUNCH_BLOCKING")
    devices = tuple([stream.device for stream in streams])
    with _lock:
        team = _teams.get(devices)
        if team is None:
            team = _teams[devices] = _new_team(streams)
    try:
        call(team)
    except Error:
        _drop_failed(devices, team)
        raise


def _drop_failed(devices: tuple[int, ...], team: _core.PushTeam) -> None:
    try:
        team.check()
    except Error:
        with _lock:
            if _teams.get(devices) is team:  # another thread may have made the next one
                del _teams[devices]


def _new_team(streams: list[_core.Stream]) -> _core.PushTeam:
    devices = [torch.device(streams_of_devices.GPU_TYPE, stream.device) for stream in streams]
    # The core checks it too, but only when there is memory already.
    if not all(streams_of_devices.reach_each_other(one, other) for one, other in itertools.combinations(devices, 2)):
        raise BackendUnavailable("push works between GPUs that reach each other's memory")
    nbytes = _core.push_memory_nbytes(len(streams))
    memory = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for device in devices]
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()  # others write there as soon as there is a team
    team = _core.PushTeam([tensor.data_ptr() for tensor in memory], streams)
    _kept.append((team, memory))
    return team
