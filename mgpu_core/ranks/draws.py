"""Find out which calls of a module draw random numbers, and give their ranks numbers of their own.

No class of a module says whether it draws: ``F.dropout``, ``torch.rand`` and a custom operator do not show.  So the
first call of each form (modes of the modules, kind of call, structure of the arguments) gives each rank a stream of
its own, whether it will draw or not.  That call decides about the calls after it::

    first call ── with streams ──┬── a stream was used ────────── later calls have streams, too
                                 └── none was: the draw that ── later calls have none; if the generator's state is
                                     seeded them is undone        another after one of them, the next call has streams

A stream costs some microseconds an operation.  Reading a generator's state costs one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from mgpu_core.devices import streams
from mgpu_core.devices.plug_ins import numbers_of
from mgpu_core.ranks.random import RankStream, current_generator, current_stream, rank_streams
from mgpu_core.ranks.team import Team
from mgpu_core.support.warnings import warn_user

__all__ = ["Draws", "Numbers"]

_KEPT = 256  # forms of calls that are remembered


class Numbers:
    """The random numbers of one call.

    Args:
        form: of the call.
        shared: accelerators that have several ranks; empty where their generators are not looked at.
        is_watched: whether the call draws is found out; otherwise it is supposed to.
        others: the states of Python's and numpy's generators, in the first call of a form; ``None``: not looked at.

    Attributes:
        streams: one per rank; ``None``: ranks draw from the generators that they share.
        in_turns: ranks of one accelerator take turns, for its numbers.
    """

    __slots__ = ("_before", "_generator", "_is_watched", "_seeded", "_states", "form", "in_turns", "others", "streams")

    def __init__(
        self, form: Hashable, shared: Sequence[torch.device], *, is_watched: bool, others: list[Any] | None
    ) -> None:
        self.form, self.others, self._is_watched, self.in_turns = form, others, is_watched, False
        self._generator = current_generator()
        self._before = self._seeded = self._generator.get_state()
        self._states = numbers_of(shared) if shared else {}
        self.streams: list[RankStream] | None = None

    def give_streams(self, ranks: int) -> None:
        """Give each rank a stream."""
        self.streams = rank_streams(ranks)
        self._seeded = self._generator.get_state()

    def have_changed(self) -> bool:
        """Return whether generators that ranks share have another state: one, or another thread, has drawn."""
        return not torch.equal(self._before, self._generator.get_state()) or (bool(self._states) and self._moved())

    def were_used(self) -> bool:
        """Return whether ranks have drawn from their streams, or from an accelerator's generator that they share."""
        return not self._is_watched or any(each.was_used for each in self.streams or ()) or self._moved()

    def _moved(self) -> bool:
        now = numbers_of(self._states)
        return any(not torch.equal(now[device], state) for device, state in self._states.items())

    def undo(self) -> None:
        """Put the caller's generator back as it was before the streams, unless another thread has used it since."""
        if torch.equal(self._seeded, self._generator.get_state()):
            self._generator.set_state(self._before)


class _CalledForm:
    """The knowledge of the calls of one form.

    Attributes:
        draws: they draw; ``None``: the next call has streams, and shows whether they do.
        is_late: an earlier call had shown that they do not.
        patience: how many calls that end with another state are let pass before the next look.  Another thread may
            draw from the same generator, a loader's for example, so each look in vain doubles it.
        passed: how many were.
    """

    __slots__ = ("draws", "is_late", "passed", "patience")

    def __init__(self) -> None:
        self.draws: bool | None = None
        self.is_late, self.patience, self.passed = False, 0, 0

    def learn(self, drew: bool) -> None:
        """Note whether a call with streams has drawn."""
        if self.is_late and not drew:
            self.patience = 2 * self.patience + 1
        self.draws = drew

    def suspect(self) -> None:
        """Note that the state was another after a call without streams."""
        if self.passed < self.patience:
            self.passed += 1
        else:
            self.draws, self.is_late, self.passed = None, True, 0


class Draws:
    """Whether the calls of a module draw random numbers.

    Args:
        rng: ``auto``: found out by the calls; ``per_rank``: always supposed; ``turns``: for steps that are recorded, in
            which ranks of one accelerator take turns, and the host draws nothing.
        name: of the module, in warnings.
        devices: whose generators are looked at, besides those of accelerators that have several ranks.

    Attributes:
        ranks_meet: ranks of the next call wait for each other, so that they take no turns before it must be.
    """

    def __init__(self, rng: str, name: str, devices: Sequence[torch.device] = ()) -> None:
        self._rng, self._name, self.ranks_meet = rng, name, False
        self._devices = [each for each in dict.fromkeys(devices) if each.type != "cpu"]
        self._forms: dict[Hashable, _CalledForm] = {}
        self._told: set[str] = set()

    def begin(self, team: Team, form: Hashable) -> Numbers:
        """Return the numbers of a call of this form, which :meth:`end` is given after it."""
        if form not in self._forms:
            if len(self._forms) >= _KEPT:
                self._forms.clear()  # they are found out again
            self._forms[form] = _CalledForm()
        known = self._forms[form]
        shared = self._devices if team.on_host else _shared_accelerators(team)
        is_recorded = self._rng == "turns" or (bool(shared) and _are_recorded(shared))  # then there is no state to read
        is_watched = self._rng == "auto" and not is_recorded
        others = _other_states() if known.draws is None and not known.is_late else None
        numbers = Numbers(form, shared if is_watched else (), is_watched=is_watched, others=others)
        if known.draws is not False or not is_watched:
            numbers.in_turns = known.draws is True or not is_watched or not self.ranks_meet
            if not is_recorded:
                numbers.give_streams(len(team))
        return numbers

    def are_expected(self, form: Hashable) -> bool:
        """Return whether an earlier call of this form has drawn."""
        return self._rng == "per_rank" or (form in self._forms and self._forms[form].draws is True)

    def end(self, numbers: Numbers, *, in_threads: bool) -> None:
        """Learn from a call that went through; warn once of numbers that depend on the order of threads."""
        is_there = numbers.form in self._forms  # another thread may have cleared the table
        known = self._forms[numbers.form] if is_there else _CalledForm()
        if numbers.streams is None:
            if known.draws is False and numbers.have_changed():
                known.suspect()
            return
        drew = numbers.were_used()
        if not drew:
            numbers.undo()
        elif (outer := current_stream()) is not None:
            outer.was_used = True
        if known.draws is None:
            known.learn(drew)
            if drew and known.is_late and in_threads:
                self._tell(
                    f"{self._name} draws random numbers, and its first call of this form had drawn none: the ranks of "
                    "the calls in between drew in the order of their threads, which is another in each run. From now "
                    'on they draw from streams of their own. With rng="per_rank" they do so from the first call on'
                )
        if in_threads and numbers.others is not None:
            self._tell_of_others(numbers, numbers.others)

    def _tell_of_others(self, numbers: Numbers, before: list[Any]) -> None:
        """Warn of generators that threads share, and that no stream stands in for."""
        names = [name for (name, state), (_, now) in zip(before, _other_states(), strict=False) if state != now]
        given = [each.given for each in numbers.streams or ()]
        names += ["a torch.Generator of its own"] * any(
            one.keys() & other.keys() for index, one in enumerate(given) for other in given[:index]
        )
        if names:
            self._tell(
                f"the forward of {self._name} draws from {' and '.join(names)}, which all ranks share: they draw in "
                "the order of their threads, and one seed gives another result in each run. Draw from torch's default "
                'generator, of which each rank has its own, or run the ranks one after the other: workers="caller"'
            )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warn_user(text, RuntimeWarning)


def _shared_accelerators(team: Team) -> list[torch.device]:
    """Return the accelerators that have several ranks."""
    devices = team.devices
    return [each for each in dict.fromkeys(devices) if each.type != "cpu" and devices.count(each) > 1]


def _are_recorded(devices: Sequence[torch.device]) -> bool:
    """Return whether a CUDA graph records the work of one of these now."""
    return any(each.type == streams.GPU_TYPE and streams.is_capturing(each.index) for each in devices)


def _other_states() -> list[tuple[str, Any]]:
    """Return the states of Python's generator, and of numpy's where numpy was imported."""
    states: list[tuple[str, Any]] = [("Python's generator (random)", random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, position, *rest = numpy.random.get_state()
        states.append(("numpy's generator (numpy.random)", (keys.tobytes(), position, rest)))
    return states
