"""The current streams of devices, as torch and the core know them, and who waits for whom.

On the CPU there is nothing to wait for.  On an accelerator the work of a rank is put on the stream that the caller had
current on the rank's device, so that the caller's work before and after the call is ordered with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, lru_cache

import torch

from mgpu_core import _core
from mgpu_core._warnings import warn_user
from mgpu_core.device.peers import settle_peers
from mgpu_core.null_context import NULL_CONTEXT

__all__ = [
    "HOST",
    "SideStreams",
    "caller_streams",
    "copy_aside",
    "copying_to",
    "core_serves",
    "core_stream",
    "core_streams",
    "hand_over",
    "is_capturing",
    "on",
    "on_all",
    "resumed_on_all",
]

HOST = _core.Stream("cpu", 0, 0)
GPU_BACKEND = "cuda"  # the core's name of it
GPU_TYPE = "cuda"  # the devices that it serves


def caller_streams(devices: Sequence[torch.device]) -> list[torch.Stream | None]:
    """Return the current stream of each device in the calling thread; ``None`` for the CPU."""
    return [None if device.type == "cpu" else torch.accelerator.current_stream(device) for device in devices]


def on(device: torch.device, stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Make ``device`` and ``stream`` the current ones of this thread."""
    return NULL_CONTEXT if device.type == "cpu" or stream is None else _on_accelerator(device, stream)


@contextmanager
def _on_accelerator(device: torch.device, stream: torch.Stream) -> Iterator[None]:
    with torch.accelerator.device_index(device.index), stream:
        yield


def on_all(devices: Sequence[torch.device], streams: Sequence[torch.Stream | None]) -> AbstractContextManager[object]:
    """Make each stream the current one of its device."""
    stack = ExitStack()
    for device, stream in zip(devices, streams, strict=True):
        if stream is not None:
            stack.enter_context(on(device, stream))
    return stack


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
    if all(device.type == "cpu" for device in devices):
        return True
    if any(device.type != GPU_TYPE for device in devices) or not _cuda_backend_works():
        return False
    return all(_has_code_for(device.index) for device in devices)


def core_streams(devices: Sequence[torch.device]) -> list[_core.Stream] | None:
    """Return one stream per rank; ``None`` unless one backend of the core serves all of these devices."""
    if not core_serves(devices):
        return None
    if not any(device.type == GPU_TYPE for device in devices):
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


@contextmanager
def copying_to(devices: Sequence[torch.device]) -> Iterator[None]:
    """Make a side stream the current one of each GPU, so that copies do not queue after its computing.

    Memory that is allocated inside belongs to the side streams: call :func:`hand_over` before computing with it.
    Other devices keep their streams.
    """
    gpus = sorted({device.index for device in devices if device.type == GPU_TYPE})
    with ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(_on_accelerator(torch.device(GPU_TYPE, gpu), _side_stream(gpu)))
        yield


def hand_over(tensors: Sequence[torch.Tensor]) -> None:
    """Let the current streams compute with tensors that were made inside :func:`copying_to`.

    The current stream waits for the copies; and the allocator waits for the current stream before it gives the memory
    to another copy.
    """
    for tensor in tensors:
        if tensor.device.type == GPU_TYPE:
            current = torch.accelerator.current_stream(tensor.device)
            current.wait_stream(_side_stream(tensor.device.index))
            tensor.record_stream(current)


def copy_aside(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start a copy of a tensor to another device, on the side streams of both where they are GPUs.

    The copy waits for this thread's current stream of the tensor's device, and the device goes on meanwhile.  Call
    :func:`hand_over` on the result before computing with it.  A tensor that is there already is returned.
    """
    source = tensor.device
    if source == device:
        return tensor
    if source.type != GPU_TYPE:
        with copying_to((device,)):
            return tensor.to(device, non_blocking=device.type != "cpu")
    side = _side_stream(source.index)
    side.wait_stream(torch.accelerator.current_stream(source))
    with copying_to((source, device)):
        copy = tensor.to(device, non_blocking=device.type != "cpu")
    tensor.record_stream(side)
    return copy


class SideStreams:
    """A side stream per GPU, for work that overlaps a backward.

    Args:
        devices: each once.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._computing: dict[torch.device, list[torch.Stream]] = {}

    def starts(self, devices: Sequence[torch.device], streams: Sequence[torch.Stream | None]) -> None:
        """Note which streams the ranks compute on from now on: one per rank, of its device."""
        self._computing = {}
        for device, stream in zip(devices, streams, strict=True):
            if stream is not None and stream not in self._computing.setdefault(device, []):
                self._computing[device].append(stream)

    def made_on_current(self, device: torch.device) -> None:
        """Note that gradients were made on the current stream of the device: sums wait for it too.

        A module may compute on a stream of its own, and autograd runs its backward there.
        """
        streams = self._computing.get(device)
        if streams is not None and (stream := torch.accelerator.current_stream(device)) not in streams:
            streams.append(stream)

    def entered(self) -> AbstractContextManager[None]:
        """Enter the side stream of each GPU, ordered after all work of its ranks so far.

        Other accelerators work on their first rank's stream, which waits for the other streams of the device.
        """
        return self._entered() if self._computing else NULL_CONTEXT

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device, streams in self._computing.items():
                current = _reducing_stream(device.index) if device.type == GPU_TYPE else streams[0]
                for each in streams:
                    if each != current:
                        current.wait_stream(each)
                stack.enter_context(_on_accelerator(device, current))
            yield

    def joins(self) -> None:
        """Order the current stream of each GPU after the work on its side stream."""
        for device in self._computing:
            if device.type == GPU_TYPE:
                torch.accelerator.current_stream(device).wait_stream(_reducing_stream(device.index))


# Torch has 32 streams of each priority on a GPU and gives them out in turn: with the usual priority, ours would be the
# user's too, from the 33rd on.  Where a GPU lacks this priority, torch takes the highest that there is.
OWN_PRIORITY = -2

_reducing_streams: dict[int, torch.Stream] = {}
_side_streams: dict[int, torch.Stream] = {}


def _reducing_stream(gpu: int) -> torch.Stream:
    return _the_only(_reducing_streams, gpu)


def _side_stream(gpu: int) -> torch.Stream:
    return _the_only(_side_streams, gpu)


def _the_only(streams: dict[int, torch.Stream], gpu: int) -> torch.Stream:
    """Return one stream for all callers; a ``cache`` could give two threads two streams."""
    made = streams.get(gpu)
    return made or streams.setdefault(gpu, torch.Stream(torch.device(GPU_TYPE, gpu), priority=OWN_PRIORITY))


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
