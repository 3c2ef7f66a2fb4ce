"""Lesson 7, streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgpu_core.lessons.answers import WrongAnswer, asks_for, expect
from mgpu_core.lessons.checks.late_device import LateDevice

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_TRIES = 100
Work = Callable[[], None]


@asks_for("copy_then_compute")
def exercise_1(answer: Callable[[LateDevice, Work, Work], object]) -> None:
    """In order in every order, and each on its stream."""
    for seed in range(_TRIES):
        device, seen = LateDevice(), list[str]()
        answer(device, lambda seen=seen: seen.append("copy"), lambda seen=seen: seen.append("compute"))  # type: ignore[misc]
        if device.streams != [0, 1]:
            raise WrongAnswer(
                "copy_then_compute: the copy belongs on stream 0 and the computing on stream 1; work was put on "
                f"streams {device.streams}"
            )
        device.run(seed)
        if seen != ["copy", "compute"]:
            raise WrongAnswer(
                "copy_then_compute: in one order that the device may choose, the computing ran before the copy"
            )


@asks_for("barrier")
def exercise_2(answer: Callable[[LateDevice, Sequence[int]], object]) -> None:
    """On 2, 1, 3 and 8 streams: everything before, before everything after."""
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
    for place, (phase, stream) in enumerate(done):
        late = next((other for earlier, other in done[place:] if earlier == 0), None)
        if phase == 1 and late is not None:
            raise WrongAnswer(
                f"barrier(device, {streams}): later work of stream {stream} ran before earlier work of stream {late}"
            )


@asks_for("double_buffer")
def exercise_3(
    answer: Callable[[LateDevice, Callable[[int, int], Work], Callable[[int], Work], int], object],
) -> None:
    """Each use reads its own batch, whatever the order; and in some order a load runs ahead."""
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


def _check_buffers(
    answer: Callable[[LateDevice, Callable[[int, int], Work], Callable[[int], Work], int], object],
    count: int,
    seed: int,
) -> set[int]:
    device, buffers, done = LateDevice(), [-1, -1], list[tuple[str, int]]()

    def load(batch: int, buffer: int) -> Work:
        def work() -> None:
            buffers[buffer] = batch
            done.append(("load", batch))

        return work

    def use(buffer: int) -> Work:
        return lambda: done.append(("use", buffers[buffer]))

    answer(device, load, use, count)
    expect(
        f"double_buffer of {count} batches: the streams of its work", sorted(device.streams), [0] * count + [1] * count
    )
    device.run(seed)
    used = [batch for what, batch in done if what == "use"]
    for wanted, got in enumerate(used):
        if got != wanted:
            raise WrongAnswer(
                f"double_buffer of {count} batches: a use read batch {got}, and it was the turn of batch {wanted}"
            )
    loads = [place for place, (what, _) in enumerate(done) if what == "load"]
    uses = [place for place, (what, _) in enumerate(done) if what == "use"]
    return {batch + 1 for batch in range(count - 1) if loads[batch + 1] < uses[batch]}
