"""All-reduce over pointers: which algorithm, and whose.

On the host the core's `auto` is `direct`.  On GPUs it is the algorithm that :mod:`mgpu_core.comm.tuning` measured;
`nccl` is NCCL's, by a team of communicators over the GPUs, `push` needs memory in which the ranks meet, and everything
else is the core's own over peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from mgpu_core import _core
from mgpu_core.comm import tuning
from mgpu_core.comm.layout import Stream
from mgpu_core.comm.reductions import BETWEEN_GPUS
from mgpu_core.devices.nccl_teams import limit_of_collectives, with_nccl
from mgpu_core.devices.push_teams import with_push
from mgpu_core.devices.streams import HOST, core_streams
from mgpu_core.errors import BackendUnavailable, Error

__all__ = ["AllReduceAlgorithm"]

_is_captured = attrgetter("is_captured")  # into a graph


@dataclass(frozen=True, slots=True)
class AllReduceAlgorithm:
    """An all-reduce: one pointer and one stream per rank, ``count`` elements of each; in place without ``outs``."""

    pointers: Sequence[int]
    streams: list[Stream]
    count: int
    dtype: str
    nbytes: int
    op: str
    merge_shared_devices: bool
    outs: Sequence[int] = ()

    def run(self, algorithm: str) -> str:
        """Return the algorithm that ran.

        Raises:
            BackendUnavailable: ``nccl`` or ``push`` on the host, while a graph is captured, or where it cannot run.
        """
        if self.streams[0] != HOST:
            asked, algorithm = algorithm, self._on_gpus(algorithm)
            if algorithm == "nccl":
                with_nccl(self._devices(), self._by_nccl)
                return algorithm
            if algorithm == "push":
                try:
                    self._push(limit_of_collectives())
                    return algorithm
                except BackendUnavailable:
                    if asked != "auto":
                        raise
                    algorithm = "direct"  # a table that was kept is of GPUs that could
        return _core.all_reduce(*self._call(), algorithm, self.streams, self.merge_shared_devices)

    def _call(self) -> tuple[list[int], list[int], int, str, str]:
        """Return the arguments with which all of the core's all-reduces begin."""
        pointers = list(self.pointers)
        return pointers, list(self.outs) or pointers, self.count, self.dtype, self.op

    def _devices(self) -> list[int]:
        return [stream.device for stream in self.streams]

    def _on_gpus(self, asked: str) -> str:
        """Return the algorithm for ``asked``: in a capture none whose kernels need an order of launches."""
        if any(map(_is_captured, self.streams)):
            if asked in BETWEEN_GPUS:
                raise BackendUnavailable(f"{asked} cannot be captured in a graph: call it between graphs")
            return "direct" if asked == "auto" else asked
        if asked != "auto":
            return asked
        devices = self._devices()
        chosen = tuning.choose(devices, self.nbytes, self._like_this)
        drops_nan = self.op in ("min", "max")  # as NCCL's do
        meets_itself = not self.merge_shared_devices and len(set(devices)) < len(devices)  # which NCCL refuses
        return "direct" if chosen == "nccl" and (drops_nan or meets_itself) else chosen

    def _by_nccl(self, team: _core.NcclTeam) -> None:
        team.all_reduce(*self._call(), self.streams, self.merge_shared_devices)

    def _push(self, limit_seconds: float) -> None:
        with_push(self.streams, lambda team: team.all_reduce(*self._call(), self.streams, limit_seconds))

    def _like_this(self, algorithm: str, nbytes: int) -> None:
        """All-reduce ones of so many bytes in the same way, and wait until that is done: a run that is timed.

        Raises:
            Error: the result is wrong, or the run was given up.
        """
        devices = [torch.device("cuda", device) for device in self._devices()]
        tensors = [torch.ones(nbytes // 4, device=device) for device in devices]
        streams = core_streams(devices)
        assert streams is not None  # they are those of GPUs that the core serves
        pointers = [tensor.data_ptr() for tensor in tensors]
        usual = AllReduceAlgorithm(pointers, streams, nbytes // 4, "float32", nbytes, "sum", merge_shared_devices=True)
        if algorithm == "push":
            usual._push(tuning.PRACTICE_SECONDS)
        else:
            usual.run(algorithm)
        for device in set(devices):
            torch.cuda.current_stream(device).synchronize()
        if algorithm == "nccl":  # a team that is given up lets its streams go on, so they say nothing
            with_nccl(self._devices(), lambda team: team.wait(streams))
        if algorithm == "push":
            with_push(streams, lambda team: team.check())
        if not all(bool(tensor.eq(len(devices)).all()) for tensor in tensors):
            raise Error(f"{algorithm} gave a wrong sum")
