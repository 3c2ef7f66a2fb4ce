"""The current streams of devices, as torch and the core know them, and who waits for whom.

On the CPU there is nothing to wait for.  On an accelerator the work of a rank is put on the stream that the caller had
current on the rank's device, so that the caller's work before and after the call is ordered with it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache
from operator import attrgetter
from threading import Lock
from typing import Literal, TypeAlias

import torch

from mgpu_core import _core
from mgpu_core.devices.peers import have_proved_access, settle_peers
from mgpu_core.errors import Error
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user

__all__ = [
    "HOST",
    "CaptureStream",
    "SideStreams",
    "caller_streams",
    "core_serves",
    "core_stream",
    "core_streams",
    "is_capturing",
    "is_for_captures",
    "on",
    "on_all",
    "own_stream",
    "reach_each_other",
    "resumed_on_all",
]

HOST = _core.Stream("cpu", 0, 0)
GPU_BACKEND = "cuda"  # the core's name of it
GPU_TYPE = "cuda"  # the devices that it serves

_type_of, _index_of = attrgetter("type"), attrgetter("index")


def caller_streams(devices: Sequence[torch.device]) -> list[torch.Stream | None]:
    """Return the current stream of each device in the calling thread; ``None`` for the CPU."""
    return [None if device.type == "cpu" else torch.accelerator.current_stream(device) for device in devices]


def on(device: torch.device, stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Make ``device`` and ``stream`` the current ones of this thread."""
    return NULL_CONTEXT if device.type == "cpu" or stream is None else _on_streams([(device, stream)])


def on_all(devices: Sequence[torch.device], streams: Sequence[torch.Stream | None]) -> AbstractContextManager[None]:
    """Make each stream the current one of its device."""
    pairs = [(device, stream) for device, stream in zip(devices, streams, strict=True) if stream is not None]
    return _on_streams(pairs) if pairs else NULL_CONTEXT


@contextmanager
def _on_streams(pairs: Sequence[tuple[torch.device, torch.Stream]]) -> Iterator[None]:
    # Not ``with stream``: torch keeps the previous stream on the stream's object, which threads share, so that each
    # thread could get back the stream of another one.
    with torch.accelerator.device_index(pairs[0][0].index):
        before = [torch.accelerator.current_stream(device) for device, _ in pairs]
        try:
            for _, stream in pairs:
                torch.accelerator.set_stream(stream)
            yield
        finally:
            for stream in reversed(before):
                torch.accelerator.set_stream(stream)


@contextmanager
def resumed_on_all(devices: Sequence[torch.device], streams: Sequence[torch.Stream | None]) -> Iterator[None]:
    """Make each stream of a forward pass current on its device again; it waits for this thread's current stream first.

    For backward passes: autograd makes the forward's stream current on one device alone, orders the gradients of all
    devices with that stream, and leaves the other devices' default streams current.
    """
    there = [stream for stream in streams if stream is not None]
    if there:
        current = torch.accelerator.current_stream()
        is_ours = any(stream.device_index == current.device_index for stream in there)
        for stream in there if is_ours else ():
            if stream != current:
                stream.wait_stream(current)
    with on_all(devices, streams):
        yield


def core_stream(device: torch.device) -> _core.Stream | None:
    """Return the current stream of a device as the core knows it; ``None`` if the core has no backend for it."""
    if device.type == "cpu":
        return HOST
    if device.type == GPU_TYPE and _cuda_backend_works() and _has_code_for(device.index):
        return _gpu_stream(device.index, _handle(device))
    return None


def core_serves(devices: Sequence[torch.device]) -> bool:
    """Return whether one backend of the core serves all of these devices."""
    kinds = set(map(_type_of, devices))
    if kinds <= {"cpu"}:
        return True
    return kinds == {GPU_TYPE} and _cuda_backend_works() and all(map(_has_code_for, map(_index_of, devices)))


def core_streams(devices: Sequence[torch.device]) -> list[_core.Stream] | None:
    """Return one stream per rank; ``None`` unless one backend of the core serves all of these devices."""
    if not core_serves(devices):
        return None
    if not devices or devices[0].type == "cpu":  # and so are all
        return [HOST] * len(devices)
    settle_peers(device.index for device in set(devices))
    return [_gpu_stream(device.index, _handle(device)) for device in devices]


@lru_cache(maxsize=256)
def _gpu_stream(gpu: int, handle: int) -> _core.Stream:
    return _core.Stream(GPU_BACKEND, gpu, handle)


def _handle(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def is_capturing(gpu: int) -> bool:
    """Return whether the current stream of this GPU is being captured in a graph; torch asks the current GPU alone."""
    with torch.accelerator.device_index(gpu):
        return torch.cuda.is_current_stream_capturing()


class SideStreams:
    """A side stream per GPU, for work that overlaps a backward.

    Args:
        devices: each once.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._computing: dict[torch.device, list[torch.Stream]] = {}
        self._summing: dict[torch.device, torch.Stream] = {}
        self._kept: dict[torch.device, deque[tuple[torch.Event, object]]] = {device: deque() for device in devices}

    def starts(self, devices: Sequence[torch.device], streams: Sequence[torch.Stream | None]) -> None:
        """Note which streams the ranks compute on from now on: one per rank, of its device."""
        self._computing = {}
        for device, stream in zip(devices, streams, strict=True):
            if stream is not None and stream not in self._computing.setdefault(device, []):
                self._computing[device].append(stream)
        self._summing = {device: _summing_stream(device, streams[0]) for device, streams in self._computing.items()}

    def made_on_current(self, device: torch.device) -> None:
        """Note that gradients were made on the current stream of the device: sums wait for it too.

        A module may compute on a stream of its own, and autograd runs its backward there.
        """
        streams = self._computing.get(device)
        if streams is not None and (stream := torch.accelerator.current_stream(device)) not in streams:
            streams.append(stream)

    def after_ranks(self, device: torch.device) -> AbstractContextManager[None]:
        """Enter the side stream of a device, ordered after all work of its ranks so far.

        Other accelerators work on their first rank's stream, which waits for the other streams of the device.
        """
        streams = self._computing.get(device)
        if streams is None:
            return NULL_CONTEXT
        side = self._summing[device]
        for stream in streams:
            if stream != side:
                side.wait_stream(stream)
        return _on_streams([(device, side)])

    def summing(self, device: torch.device) -> torch.Stream:
        """Return the side stream of a device."""
        return self._summing[device]

    def entered(self) -> AbstractContextManager[object]:
        """Enter the side streams of all devices, for work that follows what is on them."""
        return on_all([*self._summing], [*self._summing.values()])

    def keep(self, device: torch.device, gradients: object) -> None:
        """Keep gradients that the side stream of a device has read by now, until :meth:`let_go`."""
        side = self._summing.get(device)
        if side is not None and side not in self._computing[device]:
            self._kept[device].append((side.record_event(), gradients))

    def let_go(self, device: torch.device) -> None:
        """Let go of what is kept of a device; who computes on its memory next waits until it was read."""
        kept = self._kept[device]
        while kept:
            try:
                event, gradients = kept.popleft()  # which one thread gets
            except IndexError:
                return
            for stream in self._computing.get(device, ()):
                stream.wait_event(event)
            del gradients

    def joins(self) -> None:
        """Order all streams of the ranks after the work on the side streams, and let go of all that is kept."""
        for device, streams in self._computing.items():
            side = self._summing[device]
            for stream in streams:
                if stream != side:
                    stream.wait_stream(side)
            self._kept[device].clear()


# Torch has 32 streams of each priority on a GPU and gives them out in turn: with the usual priority, ours would be the
# user's too, from the 33rd on.  Where a GPU lacks this priority, torch takes the highest that there is.
OWN_PRIORITY = -2

Purpose: TypeAlias = Literal["copies", "sums", "sums of a capture"]

_own_streams: dict[tuple[Purpose, int], torch.Stream] = {}


def own_stream(purpose: Purpose, gpu: int) -> torch.Stream:
    """Return the package's stream on a GPU for one purpose: the same one for all callers and threads.

    Args:
        purpose: ``copies`` between devices, ``sums`` of gradients during a backward, and the sums that are part of a
            recording: there is one at a time (see :mod:`mgpu_core.devices.graphs`).
    """
    stream = _own_streams.get((purpose, gpu))  # not a ``cache``, which could give two threads two streams
    return stream or _own_streams.setdefault(
        (purpose, gpu), torch.Stream(torch.device(GPU_TYPE, gpu), priority=OWN_PRIORITY)
    )


_MOST_CAPTURES = 28  # of the 32 streams of our priority on a GPU

_free_captures: defaultdict[int, list[torch.Stream]] = defaultdict(list)
_captures: defaultdict[int, list[torch.Stream]] = defaultdict(list)  # all that were made, by their GPUs
_making_captures = Lock()


class CaptureStream:
    """A stream of a GPU on which the graphs of one memory pool are captured; it is given back when this object goes.

    cuBLAS keeps a workspace for each stream, and a graph computes in that of its stream: two graphs of one stream that
    are replayed at once would overwrite each other's sums, and torch frees the workspaces of the stream when one of its
    graphs goes.  So hold this as long as a graph lives.

    Attributes:
        stream: the stream.

    Raises:
        Error: there is none left.
    """

    def __init__(self, gpu: int) -> None:
        self._free = _free_captures[gpu]
        try:
            self.stream = self._free.pop()  # no lock: one is given back wherever Python collects garbage
        except IndexError:
            self.stream = _new_capture(gpu)

    def __del__(self) -> None:
        if hasattr(self, "stream"):
            self._free.append(self.stream)


def _new_capture(gpu: int) -> torch.Stream:
    with _making_captures:
        if len(_captures[gpu]) == _MOST_CAPTURES:
            raise Error(
                f"{_MOST_CAPTURES} others have CUDA graphs on GPU {gpu}, and each needs a stream of its own: close() "
                "steps and predictors with capture=True that are done"
            )
        _captures[gpu].append(torch.Stream(torch.device(GPU_TYPE, gpu), priority=OWN_PRIORITY))
        return _captures[gpu][-1]


def is_for_captures(stream: torch.Stream) -> bool:
    """Return whether a stream is one of those."""
    return stream in _captures[stream.device_index]


def _summing_stream(device: torch.device, computing: torch.Stream) -> torch.Stream:
    if device.type != GPU_TYPE:
        return computing
    return own_stream("sums of a capture" if is_for_captures(computing) else "sums", device.index)


@cache
def _has_code_for(gpu: int) -> bool:
    """Return whether this build runs on the GPU; asked of those alone that are used, because asking makes a context."""
    if _core.has_code_for(GPU_BACKEND, gpu):
        return True
    warn_user(
        f"this build of mgpu_core has no code for cuda:{gpu}: it is served by torch's copies and adds. Build with its "
        "architecture in MGPU_CUDA_ARCHS; see `mgpu doctor`.",
        RuntimeWarning,
    )
    return False


def reach_each_other(one: torch.device, other: torch.device) -> bool:
    """Return whether torch may copy between two devices directly.

    Between two GPUs that the core serves it may where :mod:`mgpu_core.devices.peers` has shown that data arrives; the
    first call about a GPU runs that test.
    """
    if not one.type == other.type == GPU_TYPE or one.index == other.index or not _cuda_backend_works():
        return True
    return have_proved_access(one.index, other.index)


@cache
def _cuda_backend_works() -> bool:
    """Return whether the core sees the GPUs that torch sees; if not, torch's own copies and adds serve them.

    Torch calls AMD's GPUs ``cuda`` too; the core's CUDA and NCCL are not for these.
    """
    if torch.version.hip is not None or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    ours, theirs = _core.device_count(GPU_BACKEND), torch.cuda.device_count()
    built = any(name == GPU_BACKEND and there for name, there, _ in _core.backends())
    if built and ours != theirs:
        warn_user(
            f"torch sees {theirs} GPUs and mgpu_core's CUDA runtime {ours}: they are served by torch's copies and adds."
            " Build mgpu_core with the CUDA toolkit that fits the driver (MGPU_CUDA=system); see `mgpu doctor`.",
            RuntimeWarning,
        )
    return built and ours == theirs
