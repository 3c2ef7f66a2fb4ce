"""The time that the work itself takes on a device; on the CPU the host is the device, and a wall clock does."""

from collections.abc import Callable

import torch

from mgpu_core.tools.advise.device_time import DeviceTime
from mgpu_core.tools.bench.timing import CacheFlush, timed


class DeviceClock:
    """Runs work on one device and says how long it took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = _L2Flush(device) if device.type == "cuda" else CacheFlush()

    def run_of(self, work: Callable[[], object], clock: str) -> Callable[[], float]:
        """Return the `run` of a contestant: `device`, the work alone, or `wall`, from the call to its end."""
        if clock == "device" and self._device.type == "cuda":
            return DeviceTime(work)
        synchronize = torch.cuda.synchronize if self._device.type == "cuda" else lambda: None
        return timed(work, synchronize)

    def flush(self) -> None:
        """Put other bytes into the last cache before memory."""
        self._flush()


class _L2Flush:
    """Reads four times the cache. Reading, because written bytes would still be on their way to memory in the run."""

    def __init__(self, device: torch.device) -> None:
        nbytes = 4 * torch.cuda.get_device_properties(device).L2_cache_size
        self._bytes = torch.ones(nbytes // 4, dtype=torch.float32, device=device)

    def __call__(self) -> None:
        self._bytes.sum()
        torch.cuda.synchronize(self._bytes.device)
