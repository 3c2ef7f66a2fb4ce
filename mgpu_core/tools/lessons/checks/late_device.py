"""A device for lessons that runs its streams in any allowed order, so missing waits show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mgpu_core.tools.lessons.answers import WrongAnswer

__all__ = ["LateDevice"]

Work = Callable[[], None]


@dataclass
class Event:
    """A point in a stream."""

    is_reached: bool = False


@dataclass
class LateDevice:
    """Streams by number; nothing runs before :meth:`run`.

    Attributes:
        running: the stream whose work runs now; None outside :meth:`run`.
    """

    queues: dict[int, list[tuple[Event | None, Work]]] = field(default_factory=dict)
    running: int | None = None

    def put(self, stream: int, work: Work) -> None:
        """Queue the work on the stream."""
        self._add(stream, None, work)

    def record(self, stream: int) -> Event:
        """Return an event after all work that is on the stream now."""
        event = Event()
        self._add(stream, None, lambda: setattr(event, "is_reached", True))
        return event

    def wait(self, stream: int, event: Event) -> None:
        """Let later work of the stream run after the event."""
        if not isinstance(event, Event):
            raise WrongAnswer(f"device.wait(stream, event): {event!r} is no event of device.record(stream)")
        self._add(stream, event, lambda: None)

    def _add(self, stream: int, event: Event | None, work: Work) -> None:
        self.queues.setdefault(stream, []).append((event, work))

    def run(self, seed: int) -> None:
        """Everything, in one of the orders that are allowed."""
        chance = random.Random(seed)
        while waiting := [(stream, queue[0][0]) for stream, queue in self.queues.items() if queue]:
            ready = [stream for stream, event in waiting if event is None or event.is_reached]
            self.running = chance.choice(ready)  # one is: what was put first of all waits for nothing that is left
            self.queues[self.running].pop(0)[1]()
        self.running = None
