"""The trace that ``mgpu_core.explain()`` yields: its steps, and the forms in which to see them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mgpu_core.support.html import html_frame, html_table, html_text
from mgpu_core.support.tables import Lines, human_seconds, text_of
from mgpu_core.tools.explain.batches import BatchRun, batches_of
from mgpu_core.tools.explain.environ import environment
from mgpu_core.tools.explain.page import page_of, write_page
from mgpu_core.tools.explain.perfetto import write_trace
from mgpu_core.tools.explain.profiles import profile_of
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.steps import BATCHES, CALLS, Recorded, Step, steps_of
from mgpu_core.tools.explain.tables import inference_rows, inference_table, phase_rows, seconds_of, table
from mgpu_core.trace.buffer import TraceBuffer

__all__ = ["Trace"]


@dataclass(repr=False)
class Trace(Recorded):
    """A recording of :func:`mgpu_core.explain`; empty until its ``with`` block ends."""

    def fill(self, buffer: TraceBuffer) -> None:
        """Take the events of a finished recording."""
        self.steps = steps_of(buffer.events, buffer.whole_steps)
        self.dropped = buffer.dropped
        self.environment = environment()

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def batches(self) -> list[BatchRun]:
        """The batches of all predictors, by the time at which they left the queue."""
        return [batch for step in self.steps if step.name == BATCHES for batch in batches_of(step)]

    def table(self, number: int | None = None) -> str:
        """Return one step as a table for the terminal: bytes moved, time, share of the step, bus bandwidth.

        Below it is a table of the batches of predictors, where there are any.

        Args:
            number: of the step, as for :meth:`step`.

        Raises:
            IndexError: there is no such step.
        """
        return text_of(self.lines(number))

    def lines(self, number: int | None = None) -> Lines:
        """Return the lines and tables of :meth:`table`."""
        return [*table(self.step(number), self.environment, self.dropped), *inference_table(self.batches)]

    def save_trace(self, path: str | Path) -> None:
        """Write all steps as a trace for https://ui.perfetto.dev or ``chrome://tracing``: a track per rank and stream.

        Raises:
            OSError: the file cannot be written; one before it is kept.
        """
        write_trace(self, Path(path))

    def save_html(self, path: str | Path) -> None:
        """Write the animated page: one file that needs no network.

        Raises:
            ValueError: nothing was recorded.
            OSError: the file cannot be written; one before it is kept.
        """
        write_page(self, Path(path))

    def __repr__(self) -> str:
        times = [(each.name, human_seconds(seconds_of(each))) for each in self.steps[-3:]]
        names = ", ".join(map(" ".join, times))
        more = "..., " if len(self) > 3 else ""
        return f"Trace({len(self)} steps: {more}{names}); print(trace.table()) shows the last, save_html() plays all"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the animated page, and the table of the last whole step."""
        try:
            parts = [html_frame(page_of(self))]
        except ValueError as error:  # nothing was recorded, or a step is too large for a page
            parts = [html_text(str(error))]
        if self.steps and self.step().name != BATCHES:
            parts.append(html_table(phase_rows(self.step())))
        if self.batches:
            parts.append(html_table(inference_rows(self.batches)))
        return "".join(parts)

    def profile(self, number: int | None = None, name: str = "recorded step") -> StepProfile:
        """Return one training step as numbers, from which :mod:`mgpu_core.tools.explain.predict` predicts other sizes.

        Args:
            number: negative ones count from the last; ``None``: the last that has made an update, where any has (with
                ``accumulate`` not all do); else the last.
            name: of the profile.

        Raises:
            IndexError: there is no such step.
            ValueError: the step has no forward and backward of its own, or it ran over a Pipeline or a
                TensorParallel.
        """
        if number is None:
            updates = [step.number for step in self.steps if any(each.step == "update" for each in step.spans)]
            number = updates[-1] if updates else None
        return profile_of(self.step(number), name)

    def step(self, number: int | None = None) -> Step:
        """Return one step.

        Args:
            number: negative ones count from the last; ``None``: the last whole step; without one, the batches of
                predictors; without those, the last calls.

        Raises:
            IndexError: there is no such step.
        """
        if number is None:
            whole = [step.number for step in self.steps if step.name not in (CALLS, BATCHES)]
            number = whole[-1] if whole else -1
        try:
            return self.steps[number]
        except IndexError:
            steps = "1 step" if len(self) == 1 else f"{len(self)} steps"
            raise IndexError(f"the trace has {steps}, and no step {number}") from None
