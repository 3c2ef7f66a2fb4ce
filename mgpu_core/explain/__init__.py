"""See your own step: what moved between the ranks, in which order, how long it took.

``with mgpu_core.explain() as story:`` records what really happens inside, in all threads and on all devices; then
``print(story.table())``, ``story.save_trace("step.json")`` for Perfetto, ``story.save_html("step.html")`` for a page
that plays the step.  ``mgpu explain script.py`` does it for a script.  With it off, a step pays for a few looks at a
flag.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

from mgpu_core import record
from mgpu_core.explain.clock import EventClock
from mgpu_core.explain.labels import labels, name_in_profilers, profile
from mgpu_core.explain.step_profile import StepProfile
from mgpu_core.explain.story import Step, Story

__all__ = ["Step", "StepProfile", "Story", "labels", "profile", "record_story"]


@contextmanager
def record_story(*, skip: int = 0, steps: int | None = None) -> Iterator[Story]:
    """Record what happens inside the block; the story is complete when it ends.  It is ``mgpu_core.explain()``.

    An error inside passes through, and the story has what happened before it.

    Args:
        skip: so many calls of ``TrainStep`` (or of its ``evaluate``) or forwards of ``DataParallel`` pass first: the
            first ones are slow.
        steps: so many are kept, and then the recording ends by itself; ``None``: all until the end of the block.

    Raises:
        ValueError: negative numbers, or no step at all.
        RuntimeError: a recording is already on: there is one per process.
        Error: a GPU did not end its work within ``MGPU_CORE_TIMEOUT`` seconds.
    """
    if skip < 0 or (steps is not None and steps < 1):
        raise ValueError(f"skip must be at least 0 and steps at least 1, not {skip} and {steps}")
    story = Story()
    recorded = None
    try:
        with record.recording(EventClock(), name_in_profilers, skip=skip, steps=steps) as recorded:
            yield story
    finally:
        if recorded is not None:
            story.fill(recorded)


class ExplainModule(ModuleType):
    """The package itself can be called."""

    def __call__(self, *, skip: int = 0, steps: int | None = None) -> AbstractContextManager[Story]:
        """Record what happens inside a ``with`` block; see :func:`record_story`."""
        return record_story(skip=skip, steps=steps)


sys.modules[__name__].__class__ = ExplainModule
