"""``Predictor``: a module on several devices, for many callers at a time."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import torch
from torch.nn import Module

from mgpu_core.devices.devices import DeviceLike, as_device, as_devices, local_devices
from mgpu_core.devices.dtypes import AMP_DTYPES
from mgpu_core.devices.streams import GPU_TYPE
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.devices.traces import refuse_traces
from mgpu_core.devices.transfer import used_here
from mgpu_core.inference.answers import Answers, ApartError
from mgpu_core.inference.engine import Engine
from mgpu_core.inference.request_queue import RequestQueue
from mgpu_core.inference.requests import Call, Joiner, Request, ServingModule
from mgpu_core.inference.served_replicas import replicas_of
from mgpu_core.inference.stats import Stats
from mgpu_core.parallel.gather_outputs import gather
from mgpu_core.pipeline.place import is_placed
from mgpu_core.ranks.compiled import compiled_calls
from mgpu_core.ranks.workers import EXIT_SECONDS
from mgpu_core.support.warnings import warn_user
from mgpu_core.tensor_parallel.module import TensorParallel
from mgpu_core.trees.moves import is_spread
from mgpu_core.trees.nested import tensors_in

__all__ = ["Predictor"]


class Predictor:
    """Answer requests of any thread with copies of a module on several devices.

    Requests of one structure, with the same dtypes and row shapes, are joined into batches; each device takes the next
    batch when it is free.  Every answer belongs to its request, and is what the module gives for a batch with that
    request in it.  The copies are made here, are in eval mode, and do not see later changes: call :meth:`refresh`.

    Use it as a context manager, or call :meth:`close`.

    Args:
        net: the module.  One that is spread over devices (:class:`mgpu_core.Pipeline`, :func:`mgpu_core.place`) runs
            where it is.
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`.
        method: the name of the method that answers; ``generate``, for example.  Its keyword arguments are those of each
            request.  Without ``split``, requests to another method than the forward are answered one at a time.
        in_flight: how many batches a module of :func:`mgpu_core.place` works on at once, each in another part; they
            count as its ranks.  As many as it has parts keep all of them busy.  Calls that set attributes or hooks on
            the one module, also for a while, run one at a time, with one warning.  Default: 1.
        max_batch: rows of a batch.
        max_wait_ms: how long the oldest request of a batch waits for others, in milliseconds.
        max_pending: requests that may wait; :meth:`submit` waits for a free slot.
        output_device: of all answers; ``None``: the device of the request's first tensor.
        amp_dtype: the dtype of autocast; ``None``: none.
        bucket_by: a function of the arguments of a call; calls with unequal results are not joined.
        collate: a function of a list of calls, each ``(args, kwargs)``, of one bucket, with the same structure and
            dtypes and any row shapes, that returns the joined ``(args, kwargs)``: to pad them, for example.
        split: a function of the outputs and the list of calls that returns the answer to each.
        compile: call ``torch.compile`` once per rank.
        capture: record CUDA graphs, one per row shape and power of two of rows.  The module must treat rows apart.

    A request's tensors on a GPU are read after the work that the caller's current stream has then.  Answers are there
    when a call or a future returns them.  Those on a GPU, or from a CPU rank, to requests of one batch are views of the
    same memory; answers from a GPU to the host have memory of their own.

    Raises:
        TypeError, ValueError: arguments that cannot be.
    """

    def __init__(
        self,
        net: Module,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        method: str = "__call__",
        in_flight: int | None = None,
        max_batch: int = 64,
        max_wait_ms: float = 2.0,
        max_pending: int = 1024,
        output_device: DeviceLike | None = None,
        amp_dtype: torch.dtype | None = None,
        bucket_by: Callable[..., Hashable] | None = None,
        collate: Callable[[list[Call]], Call] | None = None,
        split: Callable[[Any, list[Call]], Sequence[Any]] | None = None,
        compile: bool = False,  # noqa: A002 (torch's word)
        capture: bool = False,
    ) -> None:
        flying = 1 if in_flight is None else in_flight
        counts = {"max_batch": max_batch, "max_pending": max_pending, "in_flight": flying}
        _check_options(net, method, counts, max_wait_ms, amp_dtype)
        if method == "generate" and split is None and hasattr(net, "generation_config"):
            warn_user(
                "requests to generate are answered one at a time, as a text of a batch ends with its longest one; "
                "Predictor(mgpu_core.integrations.transformers.Generation(net)) joins them"
            )
        encode = None
        if isinstance(net, ServingModule):
            if capture or method != "__call__" or any((bucket_by, collate, split)):
                raise ValueError(
                    f"{type(net).__name__} says itself how requests are joined: leave capture, method, bucket_by, "
                    "collate and split out"
                )
            encode, bucket_by, collate, split = net.encode, net.bucket_by, net.collate, net.split
        for name, hook in (("bucket_by", bucket_by), ("collate", collate), ("split", split)):
            if hook is not None and not callable(hook):
                raise TypeError(f"{name} must be a function, not {hook!r}")
        self.max_batch = max_batch
        self.net, self.devices = net, _devices_of(net, device_ids, in_flight)
        if capture and any(device.type != GPU_TYPE for device in self.devices):
            raise ValueError("capture=True needs CUDA devices: a CUDA graph runs on one")
        if capture and is_spread(net):
            raise ValueError("capture=True needs a module on one device: a CUDA graph runs on one")
        if capture and method != "__call__":
            raise ValueError("capture=True records calls of the module, and no other method")
        self._joiner = Joiner(bucket_by, collate, encode)
        is_forward = method in ("__call__", "forward")
        self._answers = Answers(type(net).__name__, split, compares=collate is None, is_forward=is_forward)
        calls = _compiled_calls(net, len(self.devices), whole=compile)
        self._copies = partial(replicas_of, net, self.devices, method, compiled=calls, captured=capture)
        self._queue = RequestQueue(max_pending, max_wait_ms / 1e3, max_batch)
        target = None if output_device is None else as_device(output_device)
        self._engine = Engine(
            self._copies(), self.devices, self._queue, self._joiner, self._answers, max_batch, target, amp_dtype
        )
        self._finalizer = weakref.finalize(self, self._engine.close, drain=False, seconds=EXIT_SECONDS)
        _predictors[id(self)] = self

    def submit(self, *inputs: Any, timeout: float | None = None, **kwargs: Any) -> Future[Any]:
        """Return a future of ``net(*inputs, **kwargs)``, or of the method.

        Args:
            inputs, kwargs: with one or more rows along dimension 0 of their tensors, which must not be written before
                the answer is there; the other arguments must be equal for requests to be joined.
            timeout: seconds to wait for a free slot, where ``max_pending`` requests wait.

        Raises:
            TimeoutError: there was no free slot in that time.
            ValueError: no rows, or tensors that disagree on their number.
            TypeError: the call is traced.
            RuntimeError: the predictor is closed, or was made before a fork.
        """
        request = self._request((inputs, kwargs))
        self._put(request, timeout)
        return request.future

    def _request(self, call: Call) -> Request:
        refuse_traces()  # other threads compute the answer: a trace would keep it as a constant
        request = self._joiner.request(call)
        if self._answers.is_apart(request):
            request.rows = self.max_batch
        return request

    def _put(self, request: Request, timeout: float | None) -> None:
        if os.getpid() != self._engine.process:
            raise RuntimeError("this predictor was made before the process forked: make one in the child")
        self._queue.put(request, timeout)

    async def asubmit(self, *inputs: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Return the answer, in asyncio: other coroutines go on meanwhile.  Takes the arguments of :meth:`submit`.

        A task that is cancelled takes its request with it, unless the request is in work.
        """
        request = self._request((inputs, kwargs))
        try:
            try:
                self._put(request, 0)
            except TimeoutError:  # no slot is free: a thread waits for one
                await asyncio.to_thread(self._put, request, timeout)
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            request.future.cancel()  # also one that still waits for a free slot
            raise

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return ``net(*inputs, **kwargs)``, or the result of the method.

        The rows of a call with ``max_batch`` rows or more are cut over the devices, into batches of their own with at
        most ``max_batch`` rows.

        Raises:
            Exception: the module raised it.
        """
        whole = self._request((inputs, kwargs))
        rows, ranks = whole.own_rows, len(self.devices)
        is_cut = rows >= self.max_batch and not self._answers.is_apart(whole)
        is_cut &= not isinstance(self.net, ServingModule)
        count = min(rows, ranks * -(-rows // (ranks * self.max_batch))) if is_cut else 1
        parts = [whole] if count == 1 else [self._joiner.request(call) for call in whole.chunks(count)]
        answers = self._answers_of(parts)
        if count == 1:
            return answers[0]
        try:
            for part, answer in zip(parts, answers, strict=True):
                self._answers.check_rows(answer, part.own_rows, whole)
        except ApartError:
            return self(*inputs, **kwargs)  # whole
        tensors = tensors_in(answers[0])
        try:
            return gather(answers, tensors[0].device if tensors else torch.device("cpu"), 0)
        except ValueError as error:
            error.add_note(
                f"the {rows} rows were answered in {count} batches, whose outputs have other shapes: let the module "
                "return one shape, or submit() batches of your own and join their answers"
            )
            raise

    def _answers_of(self, parts: list[Request]) -> list[Any]:
        """Return the answers of the parts of a call, none of which is joined with others if there are several."""
        try:
            for part in parts:
                if len(parts) > 1:
                    part.rows = self.max_batch
                self._put(part, None)
            answers = [part.future.result() for part in parts]
        finally:
            for part in parts:  # after an error or Ctrl-C
                part.future.cancel()
        used_here(tensors_in(answers))  # the workers' streams made them, and the caller may be on another
        return answers

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
        self._engine.replicas = self._copies()

    def stats(self) -> Stats:
        """Return what each rank has done so far."""
        return self._engine.stats

    def close(self, drain: bool = True) -> None:
        """End the workers, once all requests are answered; with ``drain=False`` cancel those that wait."""
        if self._finalizer.detach() is not None:
            self._engine.close(drain=drain, seconds=time_limit())

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.devices))
        batches, answered = (sum(getattr(x, name) for x in self.stats()) for name in ("batches", "requests"))
        return (
            f"Predictor({type(self.net).__name__}, device_ids=[{names}], max_batch={self.max_batch})\n"
            f"{answered} requests answered in {batches} batches; print(predictor.stats()) shows each rank's"
        )

    def __getstate__(self) -> Any:
        raise TypeError(
            "a Predictor has threads and devices of its own, which cannot be copied or saved: save the module, and "
            "make a new Predictor"
        )


def _compiled_calls(net: Module, ranks: int, *, whole: bool) -> dict[str, Sequence[Any]]:
    """Return the calls of each rank of the modules that were compiled by their own method, or of the whole net."""
    compiled: dict[str, Sequence[Any]] = {
        name: compiled_calls(module, module, ranks)
        for name, module in net.named_modules()
        if module.__dict__.get("_compiled_call_impl") is not None
    }
    return compiled | ({"": compiled_calls(net, cast(Module, torch.compile(net)), ranks)} if whole else {})


def _check_options(net: Any, method: Any, counts: Mapping[str, Any], max_wait_ms: Any, amp_dtype: Any) -> None:
    if not isinstance(net, Module):
        raise TypeError(f"net must be a torch.nn.Module, not {type(net).__name__}")
    if isinstance(net, TensorParallel):
        raise TypeError(
            "a Predictor has a copy of the net on each device, or one of place(), and a TensorParallel is neither: "
            "call it from any thread, tp(x) or tp.call(...)"
        )
    if not isinstance(method, str) or not callable(getattr(net, method, None)):
        raise ValueError(f"method must be the name of a method of {type(net).__name__}, not {method!r}")
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, not {value!r}")
    if not isinstance(max_wait_ms, int | float) or not 0 <= max_wait_ms < 1e9:
        raise ValueError(f"max_wait_ms must be a number of milliseconds, 0 or more, not {max_wait_ms!r}")
    if amp_dtype not in (None, *AMP_DTYPES):
        raise TypeError(f"amp_dtype must be torch.bfloat16 or torch.float16, not {amp_dtype}")


def _devices_of(net: Module, device_ids: Sequence[DeviceLike] | None, in_flight: int | None) -> list[torch.device]:
    if is_spread(net):
        if device_ids is not None:
            raise ValueError("the module is on several devices already: leave device_ids out")
        if in_flight not in (None, 1) and not is_placed(net.model if isinstance(net, ServingModule) else net):
            raise ValueError("in_flight is for a module of place(): a Pipeline keeps its devices busy by itself")
        return [next(net.parameters()).device] * (in_flight or 1)
    if in_flight is not None:
        raise ValueError("in_flight is for a module of place(): otherwise each device works on one batch at a time")
    if device_ids is None:
        return list(local_devices()) or [torch.device("cpu")]
    return list(as_devices(device_ids))


_predictors: weakref.WeakValueDictionary[int, Predictor] = weakref.WeakValueDictionary()


def _close_all() -> None:
    """Close the predictors that are still open, unless a thread is left that may use them."""
    if all(each.daemon or each is threading.main_thread() for each in threading.enumerate()):
        for ref in _predictors.valuerefs():  # a list: another thread may make one meanwhile
            if (predictor := ref()) is not None:
                predictor._finalizer()


# Before the end of the process waits for workers that are at work: those of an open predictor wait for requests.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
