r"""The devices of a predictor: each takes a batch when it is free, runs its copy of the module, and answers.

::

    callers     submit ──┐                              ┌── future.result()
                       queue                            │
    worker 0    ── take ─┴─ copy, launch batch 1 ─ take, launch batch 2 ─ answer 1 ─ ...     an accelerator: the next
    worker 1    ── take ─── run ─ answer ─ take ─ run ─ answer ─ ...                         batch travels meanwhile

No caller waits for a worker but in its future, and no worker waits for another one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

from mgpu_core.devices.transfer import to_device
from mgpu_core.errors import Error
from mgpu_core.inference.answers import Answers
from mgpu_core.inference.request_queue import RequestQueue
from mgpu_core.inference.requests import Call, Joiner, Request, copied_to_host
from mgpu_core.inference.served_replicas import Replica
from mgpu_core.inference.stats import DeviceStats, Stats
from mgpu_core.ranks.context import CallerContext
from mgpu_core.ranks.workers import Crew
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import from_here, warn_user
from mgpu_core.trace.events import INFERENCE, Served
from mgpu_core.trace.tracer import emit, in_step, span, when_tracing
from mgpu_core.trees.nested import cloned, map_leaves, tensors_in

__all__ = ["Engine"]

_CPU = torch.device("cpu")
_numbers = count()


class _Launched(NamedTuple):
    """A batch whose work has been launched.

    Attributes:
        outputs: by the device of the answers.
        events: after all work for them, one on each accelerator; none where the CPU does everything.
    """

    requests: list[Request]
    outputs: dict[torch.device, Any]
    events: list[torch.Event]
    begin: float


class Engine:
    """The queue, the replicas and the workers.

    Args:
        replicas, devices: one per rank.
        joiner: makes batches of requests.
        answers: divides the outputs among the requests.
        max_batch: rows of a batch.
        output_device: of all answers; ``None``: the device of the request.
        amp_dtype: of autocast; ``None``: none.
    """

    def __init__(
        self, replicas: Sequence[Replica], devices: Sequence[torch.device], queue: RequestQueue, joiner: Joiner,
        answers: Answers, max_batch: int, output_device: torch.device | None, amp_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.process = os.getpid()
        self.replicas = replicas  # one list: exchanged as a whole by refresh
        self.queue, self._joiner, self._answers = queue, joiner, answers
        with torch.inference_mode(False), torch.no_grad():
            context = CallerContext(devices)  # of the thread that makes the predictor
        self.stats = Stats(DeviceStats(str(device)) for device in devices)
        self._devices, self._output_device, self._amp_dtype = devices, output_device, amp_dtype
        parts = [{device, *replica.devices} for device, replica in zip(devices, replicas, strict=True)]
        self._accelerators = [set(filter(_has_streams, part)) for part in parts]  # of each rank
        self._limits = [max_batch] * len(devices)
        self._lock, self._number = threading.Lock(), next(_numbers)
        cpu_ranks = sum(device.type == "cpu" for device in devices)
        self._serving = len(devices)
        crew = Crew("mgpu predictor", len(devices))
        crew.share(torch.get_num_threads(), max(1, cpu_ranks))
        with from_here():
            self._wait = crew.serve([context.bind(partial(self._work, rank), rank) for rank in range(len(devices))])

    def _work(self, rank: int) -> None:
        try:
            self._serve(rank)
        finally:
            with self._lock:
                self._serving -= 1
                is_last = not self._serving
            if is_last:  # no request is left without an answer
                self.queue.close()
                self._cancel()
                self.replicas = ()  # with their memory and graphs

    def close(self, *, drain: bool, seconds: float) -> None:
        """End the workers, after all requests or after those in work; cancel the requests that are left then."""
        if os.getpid() != self.process:  # the child of a fork has no workers, and the queue's lock may be held in it
            return
        self.queue.close()
        if not drain:
            self._cancel()
        self._wait(seconds)
        self._cancel()

    def _cancel(self) -> None:
        for request in self.queue.drained():
            if not request.future.cancel():  # it was in work on a device that is lost
                request.future.set_exception(Error("the predictor was closed"))

    def _serve(self, rank: int) -> None:
        """Answer batches until the queue is closed and empty, or the device is lost."""
        launched: _Launched | None = None
        limit, device = partial(self._limits.__getitem__, rank), self._devices[rank]
        here = NULL_CONTEXT if device.type == "cpu" else torch.accelerator.device_index(device.index)
        with here:  # a module may say "cuda", and some kernels start on the current device
            while True:
                is_lost = self.stats[rank].is_lost
                requests = [] if is_lost else self.queue.take(limit, wait=launched is None)
                if not requests and launched is None:
                    return
                launched = self._turn(rank, requests, launched)
                del requests  # a worker that waits keeps no tensors alive

    def _turn(self, rank: int, requests: list[Request], launched: _Launched | None) -> _Launched | None:
        """Launch a batch, answer the one before, and on the CPU this one too; return the batch without an answer."""
        following = self._attempt(rank, requests, partial(self._launch, rank, requests)) if requests else None
        on_host = not self._accelerators[rank]
        for batch in (launched, following if on_host else None):
            if batch is not None:
                self._attempt(rank, batch.requests, partial(self._answer, rank, batch))
        return None if on_host else following

    def _attempt(self, rank: int, requests: list[Request], work: Callable[[], _Launched | None]) -> _Launched | None:
        """Do a part of a batch's work; where it fails, see to the requests."""
        try:
            return work()
        except BaseException as error:
            self._failed(rank, requests, error)
            return None

    def _launch(self, rank: int, requests: list[Request]) -> _Launched | None:
        requests[:] = [each for each in requests if _is_wanted(each)]
        if not requests:
            return None
        begin, device = time.perf_counter(), self._devices[rank]
        waited = begin - min(each.begin for each in requests)
        self.stats[rank].queue_seconds.append(waited)
        with in_step(INFERENCE), span("batch", rank, device):
            outputs, events = self._outputs(rank, requests, self._joiner.joined(requests, device))
            self._tell(rank, requests, waited)
        return _Launched(requests, outputs, events, begin)

    def _outputs(
        self, rank: int, requests: list[Request], call: Call
    ) -> tuple[dict[torch.device, Any], list[torch.Event]]:
        """Return the outputs of a batch by the device of the answers, and events to wait for before they are read."""
        args, kwargs = call
        replica = self.replicas[rank]
        watch = None if replica.is_compiled else self._answers.watch(requests)  # torch compiles nothing inside a mode
        with self._autocast(rank), watch or NULL_CONTEXT:
            only_rows = all(each.has_only_rows for each in requests)
            raw = replica(args, kwargs, requests[0], captured=only_rows)
        self._answers.check_sizes(watch, requests[0])
        targets = {self._output_device or each.device for each in requests}
        outputs = {target: _outputs_on(target, raw) for target in targets}
        return outputs, _events_on({*self._accelerators[rank], *targets, *(each.device for each in tensors_in(raw))})

    def _autocast(self, rank: int) -> AbstractContextManager[object]:
        return NULL_CONTEXT if self._amp_dtype is None else torch.autocast(self._devices[rank].type, self._amp_dtype)

    @when_tracing
    def _tell(self, rank: int, requests: list[Request], waited: float) -> None:
        rows, waited_ns = sum(each.own_rows for each in requests), round(waited * 1e9)
        devices = tuple(map(str, self._devices))
        emit(lambda *now: Served(self._number, rank, devices, rows, len(requests), waited_ns, *now))

    def _answer(self, rank: int, batch: _Launched) -> None:
        for event in batch.events:
            event.synchronize()
        self._answers.check_row_shapes(next(iter(batch.outputs.values())), batch.requests)
        parts = {target: self._answers.split(outputs, batch.requests) for target, outputs in batch.outputs.items()}
        if len(batch.requests) > 1:
            self._check_alone(rank, batch.requests, parts)
        if batch.events and len(batch.requests) > 1 and _CPU in parts:
            parts[_CPU] = [map_leaves(part, _own_memory) for part in parts[_CPU]]
        stats = self.stats[rank]
        stats.compute_seconds.append(time.perf_counter() - batch.begin)
        stats.batches += 1
        stats.requests += len(batch.requests)
        stats.rows += sum(each.own_rows for each in batch.requests)
        for index, request in enumerate(batch.requests):
            answer = parts[self._output_device or request.device][index]
            if isinstance(answer, Exception):
                request.future.set_exception(_raisable(answer))
            else:
                request.future.set_result(answer)

    def _check_alone(self, rank: int, requests: list[Request], parts: Mapping[torch.device, Sequence[Any]]) -> None:
        """Raise ApartError if requests get other answers in their batch than alone."""
        device = self._devices[rank]
        answers = [parts[self._output_device or each.device][index] for index, each in enumerate(requests)]

        def run(request: Request) -> Any:
            call = cloned(self._joiner.joined([request], device))  # the module may write into it
            outputs, events = self._outputs(rank, [request], call)
            for event in events:
                event.synchronize()
            (output,) = outputs.values()
            return self._answers.split(output, [request])[0]

        with self._autocast(rank):
            half = torch.is_autocast_enabled(device.type) or self.replicas[rank].is_half
        self._answers.check_alone(requests, answers, run, half=half)

    def _failed(self, rank: int, requests: list[Request], error: BaseException) -> None:
        """Give the error to a request that failed alone; run the requests of a batch one by one, or smaller ones."""
        waiting = [each for each in requests if not each.future.done()]
        if self._is_lost(rank):
            self._lose(rank, waiting, error)
        elif len(waiting) == 1:
            self.stats[rank].failures += 1
            if any(each.dim() == 1 for each in tensors_in(waiting[0].call)):
                error.add_note("dimension 0 of a tensor counts rows: one sample x is predict(x[None])")
            waiting[0].future.set_exception(_raisable(error))
        elif isinstance(error, torch.OutOfMemoryError):
            limit = max(1, sum(each.own_rows for each in waiting) // 2)
            for other, replica in enumerate(self.replicas):
                if replica is self.replicas[rank]:  # batches in flight share its memory
                    self._limits[other] = min(limit, self._limits[other])
            self.queue.put_back(waiting)
        else:
            self.stats[rank].retries += len(waiting)
            for request in waiting:
                self._attempt(rank, [request], partial(self._alone, rank, request))

    def _alone(self, rank: int, request: Request) -> None:
        batch = self._launch(rank, [request])
        if batch is not None:
            self._answer(rank, batch)

    def _is_lost(self, rank: int) -> bool:
        """Return whether an accelerator of a rank no longer computes, as after an error that stays."""
        try:
            return any(torch.ones(1, device=each).item() != 1 for each in self._accelerators[rank])
        except torch.OutOfMemoryError:
            return False
        except RuntimeError:
            return True

    def _lose(self, rank: int, requests: list[Request], error: BaseException) -> None:
        """Take a device out; its requests go to the others."""
        with self._lock:
            self.stats[rank].is_lost = True
            is_last = all(each.is_lost for each in self.stats)
        if not is_last:
            self.queue.put_back(requests)
            warn_user(f"{self._devices[rank]} is lost, and the predictor goes on without it: {error}", RuntimeWarning)
            return
        self.queue.close()
        for request in (*requests, *self.queue.drained()):
            if _is_wanted(request):
                request.future.set_exception(error)


def _is_wanted(request: Request) -> bool:
    """Return whether nobody has cancelled the request; from now on nobody can."""
    return request.future.running() or request.future.set_running_or_notify_cancel()


def _raisable(error: BaseException) -> BaseException:
    """Return the error; another one for StopIteration, which coroutines and generators take for their end."""
    if not isinstance(error, StopIteration):
        return error
    other = RuntimeError("the module raised StopIteration")
    other.__cause__ = error
    return other


def _events_on(devices: Iterable[torch.device]) -> list[torch.Event]:
    """Return events after what the current streams of the accelerators among these have to do now."""
    return [torch.accelerator.current_stream(each).record_event() for each in filter(_has_streams, devices)]


def _has_streams(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


def _own_memory(leaf: Any) -> Any:
    """Return a copy of a part of a batch's pinned memory, all of which it would keep."""
    if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().nbytes() <= leaf.nbytes:
        return leaf
    return leaf.clone()


def _outputs_on(target: torch.device, outputs: Any) -> Any:
    """Return the outputs with their tensors on a device; the same object where they are."""
    if all(tensor.device == target for tensor in tensors_in(outputs)):
        return outputs
    return map_leaves(outputs, partial(_sent, target))


def _sent(target: torch.device, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device == target:
        return leaf
    return copied_to_host(leaf) if target.type == "cpu" else to_device(leaf, target)
