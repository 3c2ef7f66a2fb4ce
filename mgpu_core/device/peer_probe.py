"""The child that tests peers: `python -m mgpu_core.device.peer_probe 0:1 1:0` prints one line of JSON per pair.

Of a pair `device:peer`, a kernel on the device writes a pattern into the peer's memory, the peer reads what arrived,
then a kernel on the device reads it back: both must be the pattern.  Then the writing is timed.  Only
`mgpu_core.device.peers` starts this, with a time limit, because a broken machine may hang here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from mgpu_core import _core

COUNT = 16 * 1024 * 1024  # int32: 64 MiB
TIMES = 5


def main(arguments: Sequence[str]) -> int:
    """Tests each pair and tells at once, so that a hang names its pair."""
    for argument in arguments:
        device, peer = (int(number) for number in argument.split(":"))
        try:
            problem, speed = test_pair(device, peer)
        except (RuntimeError, ValueError) as error:  # torch's, and the core's of both families
            problem, speed = str(error).splitlines()[0], 0.0
        print(json.dumps({"problem": problem, "gigabytes_per_second": round(speed, 1)}), flush=True)
    return 0


def test_pair(device: int, peer: int) -> tuple[str, float]:
    """What is wrong with the pair, or nothing, and how fast the device wrote, in GB/s."""
    _core.cuda_allow_peers([(device, peer)])
    here, there = torch.device("cuda", device), torch.device("cuda", peer)
    pattern = torch.arange(COUNT, dtype=torch.int32, device=here) * 2654435 + device
    target = torch.full((COUNT,), -1, dtype=torch.int32, device=there)
    back = torch.full_like(pattern, -1)
    torch.cuda.synchronize(here)
    torch.cuda.synchronize(there)
    _copy(pattern, target, device)
    torch.cuda.synchronize(here)
    if wrong := int((target.cpu() != pattern.cpu()).sum()):
        return f"{wrong} of {COUNT} numbers arrived wrong", 0.0
    _copy(target, back, device)
    torch.cuda.synchronize(here)
    if wrong := int((back != pattern).sum()):
        return f"{wrong} of {COUNT} numbers were read back wrong", 0.0
    return "", _speed(pattern, target, device)


def _copy(source: torch.Tensor, target: torch.Tensor, device: int) -> None:
    """By a kernel of `device`, on its current stream."""
    stream = device, torch.cuda.current_stream(device).cuda_stream
    _core.sum_ranks([source.data_ptr()], [target.data_ptr()], source.numel(), "int32", "sum", stream)


def _speed(source: torch.Tensor, target: torch.Tensor, device: int) -> float:
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(TIMES):
            _copy(source, target, device)
        end.record()
        end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return TIMES * source.nbytes / (milliseconds * 1e6)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
