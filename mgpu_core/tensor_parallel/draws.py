"""Random numbers of ranks that are one module: all draw the same, those that the module alone would draw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from mgpu_core.devices.plug_ins import numbers_of, put_numbers_back
from mgpu_core.ranks.random import RankStream, current_generator, current_stream, same_numbers
from mgpu_core.ranks.run import current_lane
from mgpu_core.support.warnings import warn_user
from mgpu_core.tensor_parallel.meetings import decided, no_lane

__all__ = ["DrawnAlone", "MetDraws", "SameNumbers"]


class SameNumbers:
    """Gives the ranks the random numbers of each call.

    Args:
        name: of the module's class.
        devices: of the ranks.
    """

    def __init__(self, name: str, devices: Sequence[torch.device]) -> None:
        self._name, self._devices = name, devices
        self._drew: dict[tuple[str, bytes], bool] = {}  # by method and modes, whether the first such call has drawn

    @contextmanager
    def of_call(self, method: str, modes: bytes) -> Iterator[tuple[Sequence[RankStream | None], DrawnAlone | None]]:
        """Yield the random numbers of each rank; none if the method's first call in these modes has drawn none.

        In methods other than the forward rank 0 draws for all ranks, by the names of torch's functions.
        """
        key, devices = (method, modes), self._devices
        draws = self._drew.get(key)
        if len(devices) == 1:
            yield [None], None
            return
        if draws is False:
            drawn = DrawnAlone([torch.device("cpu"), *devices])
            yield [None] * len(devices), drawn
            drawn.look()
            if drawn.on is not None:
                self._drew[key] = True
                warn_user(
                    f"random numbers were drawn while {self._name} ran, and its first call had drawn none: "
                    "the ranks may have drawn others in this call; from now on they draw the same"
                )
            return
        with same_numbers(devices) as streams:
            drawn = DrawnAlone([device for device in devices if device.type != "cpu"])
            on_cpu = streams[0].generator.get_state()
            yield streams, drawn
            drawn.look()
        of_ranks = any(not torch.equal(stream.generator.get_state(), on_cpu) for stream in streams)
        self._drew[key] = drawn.on is not None or drawn.for_all or of_ranks
        if drawn.on is not None and (len(set(devices)) < len(devices) or len({device.type for device in devices}) > 1):
            raise RuntimeError(
                f"random numbers were drawn on {drawn.on}, and not all ranks can draw the same: give each rank a "
                "device of its own, all of one kind"
            )


class DrawnAlone:
    """Whether ranks have drawn random numbers each for itself, from the generators of these devices.

    Attributes:
        on: the first device found on which they have; ``None``: none.
        for_all: rank 0 has drawn for all.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.on: torch.device | None = None
        self.for_all, self._states = False, _states_of(devices)

    def look(self) -> None:
        """Compare the generators with their states at the last look, or after rank 0's last draw."""
        now = _states_of(self._states)
        drew = (each for each, state in now.items() if not torch.equal(state, self._states[each]))
        self.on, self._states = self.on or next(drew, None), now

    def drawn_for_all(self, draw: Callable[[], Any]) -> Any:
        """Draw in rank 0 for all ranks, and return the result."""
        self.look()
        result = draw()
        self.for_all, self._states = True, _states_of(self._states)
        return result


def _states_of(devices: Collection[torch.device]) -> dict[torch.device, torch.Tensor]:
    accelerators = [device for device in devices if device.type != "cpu"]
    states = numbers_of(accelerators) if accelerators else {}
    return states | {device: torch.get_rng_state() for device in devices if device.type == "cpu"}


class _AfterDraw:
    """The generators of rank 0 after a draw for all ranks, which go on from there: a layer may draw next."""

    def __init__(self) -> None:
        self._on_cpu, self._device = current_generator().get_state(), _device_of_lane()
        self._here = numbers_of([self._device]).get(self._device)

    def follow(self) -> None:
        """Put this rank's own generators in the same states."""
        if current_stream() is not None:  # otherwise all ranks have one
            current_generator().set_state(self._on_cpu)
        device = _device_of_lane()
        if self._here is not None and device.type == self._device.type and device != self._device:
            put_numbers_back({device: self._here})


def _device_of_lane() -> torch.device:
    lane = current_lane() or no_lane("random numbers")
    return lane.run.team.devices[lane.rank]


class MetDraws(TorchFunctionMode):
    """Let rank 0 draw random numbers for all ranks, in calls of torch's functions by name."""

    def __init__(self, rank: int, drawn: DrawnAlone) -> None:
        super().__init__()
        self._rank, self._drawn = rank, drawn

    def __enter__(self) -> MetDraws:
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _DRAWS:
            return func(*args, **kwargs)
        draw = partial(self._drawn.drawn_for_all, partial(func, *args, **kwargs))
        result, after = decided(name, lambda: (draw(), _AfterDraw()))
        if self._rank:
            after.follow()
        if name.endswith("_") and self._rank:
            return args[0].copy_(result)
        return result


_DRAWS = frozenset(
    f"{name}{end}"
    for name in (
        *("multinomial", "bernoulli", "rand", "randn", "randint", "randperm", "normal", "poisson", "rand_like"),
        *("randn_like", "randint_like", "uniform", "exponential", "geometric", "cauchy", "log_normal", "random"),
    )
    for end in ("", "_")
)
"""Names of the functions and methods that draw."""
