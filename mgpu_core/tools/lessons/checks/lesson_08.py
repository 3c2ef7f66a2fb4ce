"""Lesson 8, choosing devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mgpu_core.devices.discovery import PhysicalDevice, parse_visible_devices
from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_MASKS = (
    None,
    "2,0",
    "1,9,2",
    "0,0",
    "0,1,2,3",
    "-1",
    "",
    "3,-1,2",
    "1,2,1",
    "0",
    "4",
    "9,1,1",
    "2,,1",
    "1,,",
    "1,-1,2,2",
    "1,9,9",
)


def _seen(mask: str | None, count: int) -> list[int]:
    """Read the variable as the package does."""
    machine = [PhysicalDevice(index, f"GPU-{index}", f"0000:{index}:00.0", "a card") for index in range(count)]
    devices = parse_visible_devices(mask, machine).devices
    assert devices is not None  # the machine is known
    return [device.physical.index for device in devices]


@asks_for("visible")
def exercise_1(answer: Callable[[str | None, int], Any]) -> None:
    """Check: as the driver reads it, on machines of 4, 1, 2 and 8 cards."""
    for count in (4, 1, 2, 8):
        for mask in _MASKS:
            expect(f"visible({mask!r}, {count})", answer(mask, count), _seen(mask, count))


@asks_for("mask_for")
def exercise_2(answer: Callable[[list[int]], Any]) -> None:
    """Check: the mask is read back."""
    for cards in ([3, 1], [0], [0, 1, 2, 3], [2, 0, 1], []):
        mask = answer(list(cards))
        if not isinstance(mask, str):
            raise WrongAnswer(f"mask_for({cards}): expected a text, got {mask!r}")
        expect(f"cuda:0, 1, ... under mask_for({cards}) = {mask!r}", _seen(mask, 4), cards)


@asks_for("ranks_on")
def exercise_3(answer: Callable[[list[str]], Any]) -> None:
    """Check: shared devices, several kinds, one rank."""
    teams = {
        ("cuda:0", "cuda:0"): {"cuda:0": [0, 1]},
        ("cpu",): {"cpu": [0]},
        ("cuda:1", "cuda:0", "cuda:1"): {"cuda:1": [0, 2], "cuda:0": [1]},
        ("cpu",) * 8: {"cpu": list(range(8))},
        ("cuda:0", "cpu", "cuda:0"): {"cuda:0": [0, 2], "cpu": [1]},
    }
    for devices, wanted in teams.items():
        expect(f"ranks_on({list(devices)})", answer(list(devices)), wanted)  # also in the order of the devices
