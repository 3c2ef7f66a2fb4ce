"""Whether a step can go on: after failures, where one put all back or a rank is still at work, and after its end."""

from __future__ import annotations

from mgpu_core.devices.time_limits import time_limit
from mgpu_core.errors import Error
from mgpu_core.step.process_sums import ProcessSums
from mgpu_core.step.ranks import Ranks
from mgpu_core.step.reducer import Gradients
from mgpu_core.step.update import Update

__all__ = ["Standing"]

_CLOSED = RuntimeError, "this step was closed"


class Standing:
    """Whether a step can go on.

    Args:
        processes: that it shares with others.

    Attributes:
        refusal: why no step can be made; ``None``: one can.
    """

    def __init__(self, processes: ProcessSums | None) -> None:
        self._processes = processes
        self.refusal: tuple[type[Exception], str] | None = None

    def check(self) -> None:
        """Raise why no step can be made, if that is so."""
        if self.refusal is not None:
            kind, reason = self.refusal
            raise kind(reason)

    def check_open(self) -> None:
        """Raise RuntimeError after the end."""
        if self.refusal == _CLOSED:
            self.check()

    def close(self) -> bool:
        """End the step; return whether it had not ended yet."""
        was_open = self.refusal != _CLOSED
        self.refusal = _CLOSED
        return was_open

    def give_up(self, ranks: Ranks, gradients: Gradients, update: Update) -> None:
        """Wait for ranks that are still at work, and drop the gradients of the calls since the last update."""
        gradients.cancel()
        if self.have_ended(ranks):
            if self._processes is not None:
                self._processes.abandon()
            update.restore()
            self.refuse(update.broken)

    def have_ended(self, ranks: Ranks) -> bool:
        """Wait, after a failure, for ranks that are still at work; where one does not end, the step is broken."""
        seconds = time_limit()
        self.refuse("a rank may still be at work in a step that was given up")  # Ctrl-C may come again
        all_ended = ranks.stop(seconds)
        if all_ended:
            ranks.end_blocks()
        else:
            self.refuse(f"a rank was still at work {seconds:g} s after its step had failed")
        return all_ended

    def refuse(self, broken: str | None) -> None:
        """Keep why no further step can be made: ``broken``, or a failure between processes, or the end."""
        if self.refusal == _CLOSED:
            return
        if self._processes is not None and self._processes.broken is not None:
            self.refusal = Error, self._processes.broken
        else:
            self.refusal = None if broken is None else (Error, f"{broken}: call step.rebuild(), or make a new one")
