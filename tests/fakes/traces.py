"""Find the entries of a recording."""

from mgpu_core.trace import tracer
from mgpu_core.trace.events import Collective, Contents, Span


def of(trace, kind, step=None):
    found = [each for each in trace.events if isinstance(each, kind)]
    return [each for each in found if step in (None, each.operation if kind is Collective else each.step)]


def traced(call):
    """Return the recording of a call."""
    with tracer.tracing() as trace:
        call()
    return trace


def buckets(trace):
    """Return the names of the parameters in each bucket that was summed, by the bucket's number."""
    found = {each.bucket: list(each.names) for each in of(trace, Contents, "all_reduce")}
    return [found[bucket] for bucket in sorted(found)]


def is_fused(trace, kind):
    """Return whether the optimizer's own kernel of this name made the update."""
    return any(each.step == kind for each in of(trace, Span))


def names(trace):
    return {each.operation if isinstance(each, Collective) else each.step for each in trace.events}
