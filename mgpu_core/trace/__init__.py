"""Traces: the events of a step, and their times.

``events`` are the records, ``buffer`` collects them, ``tracer`` is the flag and the spans that the core opens.
:func:`labels` and :func:`profile` give the spans a name in ``torch.profiler`` and Nsight.
"""

from mgpu_core.trace.profilers import labels, profile

__all__ = ["labels", "profile"]
