"""Find the entries of a recording."""

from mgpu_core.trace.events import Collective


def of(trace, kind, step=None):
    found = [each for each in trace.events if isinstance(each, kind)]
    return [each for each in found if step in (None, each.operation if kind is Collective else each.step)]


def names(trace):
    return {each.operation if isinstance(each, Collective) else each.step for each in trace.events}
