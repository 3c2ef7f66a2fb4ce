"""The child that tests peers; `python -m mgpu_core.devices.peer_probe 0:1:UUID:UUID ...` prints JSON, a line a pair.

Of a pair `device:peer`, a kernel on the device writes a pattern into the peer's memory, the peer reads it, a
kernel on the device reads it back, and the copy engines fetch it once more: all must be the pattern.  Then the writing
is timed.  Only `mgpu_core.devices.peers` starts this, with a time limit, because a broken machine may hang here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from mgpu_core import _core
from mgpu_core.devices.peers import DRIVER_REFUSES, map_for_peer

COUNT = 16 * 1024 * 1024  # int32: 64 MiB
TIMES = 5


class NoPeer(Exception):
    """The machine's answer: these two do not reach each other."""


def main(arguments: Sequence[str]) -> int:
    """Test each pair and tell at once, so that a hang names its pair."""
    for argument in arguments:
        device, peer, *uuids = argument.split(":")
        problem, speed, proved = "", 0.0, True
        try:
            speed = measure_pair(int(device), int(peer), uuids)
        except NoPeer as verdict:
            problem = str(verdict)
        except (RuntimeError, ValueError) as error:  # torch's, and the core's of both families
            problem, proved = str(error).splitlines()[0], False
        answer = {"problem": problem, "gigabytes_per_second": round(speed, 1), "proved": proved}
        print(json.dumps(answer), flush=True)
    return 0


def measure_pair(device: int, peer: int, uuids: Sequence[str]) -> float:
    """Return how fast the device writes the peer's memory, in GB/s.

    Raises:
        NoPeer: it does not, or not rightly.
        RuntimeError, ValueError: the test could not be made.
    """
    for index, uuid in zip((device, peer), uuids, strict=True):
        if str(torch.cuda.get_device_properties(index).uuid) != uuid:
            raise ValueError(f"cuda:{index} is another GPU here: CUDA_VISIBLE_DEVICES was changed after CUDA's start")
    if not torch.cuda.can_device_access_peer(device, peer):
        raise NoPeer(DRIVER_REFUSES)
    _core.allow_peers("cuda", [(device, peer), (peer, device)])
    map_for_peer(device, peer)
    here, there = torch.device("cuda", device), torch.device("cuda", peer)
    pattern = torch.arange(COUNT, dtype=torch.int32, device=here) * 2654435 + device
    target, back = torch.full((COUNT,), -1, dtype=torch.int32, device=there), torch.full_like(pattern, -1)
    _settle(here, there)
    _by_kernel(pattern, target, device)
    _compare(target, pattern, "arrived wrong")
    _by_kernel(target, back, device)
    _compare(back, pattern, "were read back wrong")
    target.fill_(-1)
    _settle(here, there)
    _by_copy_engine(pattern, target)
    _compare(target, pattern, "were copied wrong")
    return _speed(pattern, target, device)


def _settle(*devices: torch.device) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _compare(copied: torch.Tensor, wanted: torch.Tensor, how: str) -> None:
    _settle(copied.device, wanted.device)
    if wrong := int((copied.cpu() != wanted.cpu()).sum()):
        raise NoPeer(f"{wrong} of {COUNT} numbers {how}")


def _stream(device: int) -> _core.Stream:
    return _core.Stream("cuda", device, torch.cuda.current_stream(device).cuda_stream)


def _by_kernel(source: torch.Tensor, target: torch.Tensor, device: int) -> None:
    """Copy by a kernel of `device`, on its current stream."""
    _core.sum_ranks([source.data_ptr()], [target.data_ptr()], source.numel(), "int32", "sum", _stream(device))


def _by_copy_engine(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy as large tensors are copied: the target's device fetches."""
    streams = _stream(source.device.index), [_stream(target.device.index)]
    _core.broadcast([source.data_ptr()], [[target.data_ptr()]], [source.nbytes], *streams)


def _speed(source: torch.Tensor, target: torch.Tensor, device: int) -> float:
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(TIMES):
            _by_kernel(source, target, device)
        end.record()
        end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return TIMES * source.nbytes / (milliseconds * 1e6)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
