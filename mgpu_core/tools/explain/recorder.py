"""``explain``: record a block of code as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from mgpu_core.tools.explain.clock import EventClock
from mgpu_core.tools.explain.trace import Trace
from mgpu_core.trace import tracer
from mgpu_core.trace.profilers import name_in_profilers

__all__ = ["explain"]


def explain(*, skip: int = 0, steps: int | None = None) -> AbstractContextManager[Trace]:
    """Record the events inside a ``with`` block, in all threads and on all devices.

    The trace is complete when the block ends.  An error inside passes through, and the trace has the events before it.

    Args:
        skip: number of calls of ``TrainStep`` (or of its ``evaluate``), or forwards of ``DataParallel`` and of modules
            that are spread over devices, to ignore first; the first ones are slow.  Batches of a ``Predictor`` are all
            kept.
        steps: number of them to keep; the recording then ends by itself.  ``None``: until the end of the block.

    Raises:
        ValueError: ``skip`` is negative or ``steps`` is less than 1.
        RuntimeError: a trace is already being recorded; there is one per process.
        Error: a GPU did not finish its work within ``MGPU_CORE_TIMEOUT`` seconds.
    """
    if skip < 0 or (steps is not None and steps < 1):
        raise ValueError(f"skip must be at least 0 and steps at least 1, not {skip} and {steps}")
    return _record(skip, steps)


@contextmanager
def _record(skip: int, steps: int | None) -> Iterator[Trace]:
    trace, buffer = Trace(), None
    try:
        with tracer.tracing(EventClock(), name_in_profilers, skip=skip, steps=steps) as buffer:
            yield trace
    finally:
        if buffer is not None:
            trace.fill(buffer)
