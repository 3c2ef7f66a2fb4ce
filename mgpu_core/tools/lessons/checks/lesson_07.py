"""Lesson 7, streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect
from mgpu_core.tools.lessons.checks.late_device import LateDevice

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_TRIES = 100
Work = Callable[[], None]


@asks_for("copy_then_compute")
def exercise_1(answer: Callable[[LateDevice, Work, Work], object]) -> None:
    """Check: in order in every order, and each on its stream."""
    for seed in range(_TRIES):
        device, seen = LateDevice(), list[tuple[str, int | None]]()
        answer(device, *(partial(_note, device, seen, name) for name in ("copy", "compute")))
        device.run(seed)
        if len(seen) != 2 or set(seen) != {("copy", 0), ("compute", 1)}:
            raise WrongAnswer(
                "copy_then_compute: the copy belongs on stream 0 and the computing on stream 1; what ran, and on which "
                f"stream: {seen}"
            )
        if seen[0][0] != "copy":
            raise WrongAnswer(
                "copy_then_compute: in one order that the device may choose, the computing ran before the copy"
            )


def _note(device: LateDevice, seen: list[tuple[str, int | None]], name: str) -> None:
    """Return work that notes that it runs, and where."""
    seen.append((name, device.running))


@asks_for("barrier")
def exercise_2(answer: Callable[[LateDevice, Sequence[int]], object]) -> None:
    """Check: on 2, 1, 3 and 8 streams: everything before, before everything after."""
    for streams in ([0, 1], [0], [0, 1, 2], [5, 2, 9], list(range(8))):
        for seed in range(_TRIES):
            _check_barrier(answer, streams, seed)


def _check_barrier(answer: Callable[[LateDevice, Sequence[int]], object], streams: list[int], seed: int) -> None:
    device, done = LateDevice(), list[tuple[int, int]]()
    for stream in streams:
        device.put(stream, lambda stream=stream: done.append((0, stream)))  # type: ignore[misc]
    answer(device, list(streams))
    for stream in streams:
        device.put(stream, lambda stream=stream: done.append((1, stream)))  # type: ignore[misc]
    device.run(seed)
    for index, (phase, stream) in enumerate(done):
        late = next((other for earlier, other in done[index:] if earlier == 0), None)
        if phase == 1 and late is not None:
            raise WrongAnswer(
                f"barrier(device, {streams}): later work of stream {stream} ran before earlier work of stream {late}"
            )


@asks_for("double_buffer")
def exercise_3(
    answer: Callable[[LateDevice, Callable[[int, int], Work], Callable[[int], Work], int], object],
) -> None:
    """Check: each use reads its own batch, whatever the order; and in some order a load runs ahead."""
    for count in (5, 1, 2, 3, 8):
        ran_ahead: set[int] = set()
        for seed in range(_TRIES):
            ran_ahead |= _check_buffers(answer, count, seed)
        for batch in range(1, count):
            if batch not in ran_ahead:
                raise WrongAnswer(
                    f"double_buffer of {count} batches: the load of batch {batch} never ran ahead of the use of the "
                    "batch before: it waits for more than the last use of its buffer"
                )


class _Buffers:
    """Two buffers, and a log of their uses: (load or use, batch, stream)."""

    def __init__(self) -> None:
        self.device, self.done = LateDevice(), list[tuple[str, int, int | None]]()
        self._batches = [-1, -1]

    def load(self, batch: int, buffer: int) -> Work:
        """Return the work of a load."""

        def work() -> None:
            self._batches[buffer] = batch
            self.done.append(("load", batch, self.device.running))

        return work

    def use(self, buffer: int) -> Work:
        """Return the work that reads a buffer."""
        return lambda: self.done.append(("use", self._batches[buffer], self.device.running))

    def streams(self, what: str) -> list[int | None]:
        """Return the streams of all loads or uses, in the order in which they ran."""
        return [stream for each, _, stream in self.done if each == what]

    def indices(self, what: str) -> list[int]:
        """Return the indices of all loads or uses among all work."""
        return [index for index, (each, _, _) in enumerate(self.done) if each == what]


def _check_buffers(
    answer: Callable[[LateDevice, Callable[[int, int], Work], Callable[[int], Work], int], object],
    count: int,
    seed: int,
) -> set[int]:
    call, buffers = f"double_buffer of {count} batches", _Buffers()
    answer(buffers.device, buffers.load, buffers.use, count)
    buffers.device.run(seed)
    streams = {what: buffers.streams(what) for what in ("load", "use")}
    expect(f"{call}: the streams that its work ran on", streams, {"load": [0] * count, "use": [1] * count})
    used = [batch for what, batch, _ in buffers.done if what == "use"]
    for wanted, got in enumerate(used):
        if got != wanted:
            raise WrongAnswer(f"{call}: a use read batch {got}, and it was the turn of batch {wanted}")
    loads, uses = buffers.indices("load"), buffers.indices("use")
    return {batch + 1 for batch in range(count - 1) if loads[batch + 1] < uses[batch]}
