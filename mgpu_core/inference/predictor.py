"""``Predictor``: a module on several devices, for many callers at a time."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.device.devices import DeviceLike, as_device, as_devices, local_devices
from mgpu_core.device.workers import EXIT_SECONDS, time_limit
from mgpu_core.inference.engine import Engine, snapshots
from mgpu_core.inference.request_queue import RequestQueue
from mgpu_core.inference.requests import Request
from mgpu_core.inference.stats import Stats
from mgpu_core.nested import tensors_in
from mgpu_core.parallel.gather_outputs import gather
from mgpu_core.pipeline.placement import is_spread

__all__ = ["Predictor"]


class Predictor:
    """Answer requests of any thread with copies of a module on several devices.

    Requests of one structure, with the same dtypes and row shapes, are joined into batches; each device takes the next
    batch when it is free.  Every answer belongs to its request, and is what the module gives for a batch with that
    request in it.  The copies are made here, are in eval mode, and do not see later changes: call :meth:`refresh`.

    Use it as a context manager, or call :meth:`close`.

    Args:
        net: the module.  One that is spread over devices (:class:`mgpu_core.Pipeline`, :func:`mgpu_core.place`) runs
            where it is, as a single rank.
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`.
        max_batch: rows of a batch.
        max_wait_ms: how long the oldest request of a batch waits for others, in milliseconds.
        max_pending: requests that may wait; :meth:`submit` waits for a free slot.
        output_device: of all answers; ``None``: the device of the request's first tensor.
        amp_dtype: the dtype of autocast; ``None``: none.

    Raises:
        TypeError, ValueError: arguments that cannot be.
    """

    def __init__(
        self,
        net: Module,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        max_batch: int = 64,
        max_wait_ms: float = 2.0,
        max_pending: int = 1024,
        output_device: DeviceLike | None = None,
        amp_dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(net, Module):
            raise TypeError(f"net must be a torch.nn.Module, not {type(net).__name__}")
        for name, value in (("max_batch", max_batch), ("max_pending", max_pending)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, not {value!r}")
        if not isinstance(max_wait_ms, int | float) or not 0 <= max_wait_ms < 1e9:
            raise ValueError(f"max_wait_ms must be a number of milliseconds, 0 or more, not {max_wait_ms!r}")
        self._net, self.max_batch = net, max_batch
        self.devices = _devices_of(net, device_ids)
        self._queue = RequestQueue(max_pending, max_wait_ms / 1e3)
        target = None if output_device is None else as_device(output_device)
        self._engine = Engine(snapshots(net, self.devices), self.devices, self._queue, max_batch, target, amp_dtype)
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, self._engine.close, drain=False, seconds=EXIT_SECONDS)
        _predictors.add(self)

    def submit(self, *inputs: Any, timeout: float | None = None, **kwargs: Any) -> Future[Any]:
        """Return a future of ``net(*inputs, **kwargs)``.

        Args:
            inputs, kwargs: with one or more rows along dimension 0 of their tensors, which must not be written before
                the answer is there; the other arguments must be equal for requests to be joined.
            timeout: seconds to wait for a free slot, where ``max_pending`` requests wait.

        Raises:
            TimeoutError: there was no free slot in that time.
            ValueError: no rows, or tensors that disagree on their number.
            RuntimeError: the predictor is closed, or was made before a fork.
        """
        request = Request(inputs, kwargs)
        self._put(request, timeout)
        return request.future

    def _put(self, request: Request, timeout: float | None) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this predictor was made before the process forked: make one in the child")
        self._queue.put(request, timeout)

    async def asubmit(self, *inputs: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Return the answer, in asyncio: other coroutines go on meanwhile.  Takes the arguments of :meth:`submit`.

        A task that is cancelled takes its request with it, unless the request is in work.
        """
        request = Request(inputs, kwargs)
        try:
            await asyncio.to_thread(self._put, request, timeout)
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.future.cancel()  # also one that still waits for a free slot
            raise

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``net(*inputs, **kwargs)``; rows are cut over the devices, into batches of at most ``max_batch``.

        Raises:
            Exception: the module raised it.
        """
        whole = Request(inputs, kwargs)
        most = min(self.max_batch, -(-whole.rows // len(self.devices)))
        parts = [whole] if whole.rows <= most else whole.chunks(most)
        for part in parts:
            self._put(part, None)
        answers = [part.future.result() for part in parts]
        if len(answers) == 1:
            return answers[0]
        tensors = tensors_in(answers[0])
        return gather(answers, tensors[0].device if tensors else torch.device("cpu"), 0)

    def map(self, batches: Iterable[Any], *, ahead: int | None = None, progress: bool = False) -> Iterator[Any]:
        """Yield the answer of each batch, in the order of the batches.

        Args:
            batches: each a tuple of inputs, or the only input.
            ahead: how many may be in work or wait to be yielded (default: four per device).
            progress: show a bar (tqdm).

        Raises:
            Exception: the module raised it; the batches after it are cancelled.
        """
        ahead = 4 * len(self.devices) if ahead is None else ahead
        if progress:
            from tqdm.auto import tqdm

            batches = tqdm(batches)
        waiting: deque[Future[Any]] = deque()
        try:
            for batch in batches:
                waiting.append(self.submit(*(batch if isinstance(batch, tuple) else (batch,))))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def refresh(self) -> None:
        """Take the weights and buffers that the module has now; batches that have begun end with the old ones."""
        self._engine.modules = snapshots(self._net, self.devices)

    def stats(self) -> Stats:
        """Return what each rank has done so far."""
        return self._engine.stats

    def close(self, drain: bool = True) -> None:
        """End the workers, once all requests are answered; with ``drain=False`` cancel those that wait."""
        if self._finalizer.detach() is not None and os.getpid() == self._process:
            self._engine.close(drain=drain, seconds=time_limit())

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(drain=kind is None)


def _devices_of(net: Module, device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    if is_spread(net):
        if device_ids is not None:
            raise ValueError("the module is on several devices already: leave device_ids out")
        return [next(net.parameters()).device]
    if device_ids is None:
        return list(local_devices()) or [torch.device("cpu")]
    return list(as_devices(device_ids))


_predictors: weakref.WeakSet[Predictor] = weakref.WeakSet()


def _close_all() -> None:
    """Close the predictors that are still open, unless a thread is left that may use them."""
    if all(each.daemon or each is threading.main_thread() for each in threading.enumerate()):
        for predictor in list(_predictors):
            if predictor._process == os.getpid():
                predictor._finalizer()


# Before the end of the process waits for workers that are at work: those of an open predictor wait for requests.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
