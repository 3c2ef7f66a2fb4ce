"""Signs of life on stderr: how far a command is, and how long it will still take.

The work reports a share of 1 and a few words, between its measurements: nothing is drawn while something is timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Progress", "Report", "silent", "within"]

Report = Callable[[float, str], object]
"""Called with the share of the work that is done, 0 to 1, and words on what comes next."""

EVERY_SECONDS = 5.0
"""Between two lines where no terminal reads them; a run that is over sooner has none."""


def silent(share: float, text: str) -> None:
    """Report nothing: for calls from Python."""


def within(report: Report, index: int, count: int) -> Report:
    """Return the report of one of ``count`` equal parts of the work."""
    return lambda share, text: report((index + share) / count, text)


class Progress:
    """A report as a context manager: one live line on a terminal, gone at the end; otherwise a line now and then.

    Args:
        command: in front of each line.
        now: the time in seconds.
    """

    def __init__(self, command: str, now: Callable[[], float] = time.monotonic) -> None:
        self._command, self._now = command, now
        self._begin = self._last = now()
        self._live: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn()
            settings: dict[str, Any] = dict.fromkeys(("auto_refresh", "redirect_stdout", "redirect_stderr"), False)
            self._live = Bar(*columns, console=Console(stderr=True), transient=True, **settings)
            self._live.add_task("", total=1.0)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.hide()

    def __call__(self, share: float, text: str) -> None:
        """Show the share that is done, and what comes next."""
        now = self._now()
        line = f"{self._command}: {text}{_left(now - self._begin, share)}"
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=share, description=line)
            self._live.start()
            self._live.refresh()
        elif now - self._last >= EVERY_SECONDS and sys.stderr is not None:
            self._last = now
            print(line, file=sys.stderr, flush=True)

    def hide(self) -> None:
        """Take the live line away, until the next report: others write to the terminal now."""
        if self._live is not None and self._live.live.is_started:
            self._live.stop()


def _left(elapsed: float, share: float) -> str:
    """Return the time that is left, if all of the work goes on as it has begun."""
    if not 0 < share < 1:
        return ""
    seconds = elapsed * (1 - share) / share
    return f", about {f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} min'} left"
