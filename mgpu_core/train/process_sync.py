"""An update that several processes make as one: all of them, by the same sums, or none.

Each process sends its ballot with its last bucket.  One that fails, or is interrupted, before that has left says so
in the same messages, so that no process waits for it, and all give the step up.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.errors import Error
from mgpu_core.module_tree import named_parameters_of, parameters_of
from mgpu_core.processes.agreement import check_agreement, digest, facts_of, first_difference, numbers_of
from mgpu_core.processes.ballot import Ballot, Standing, Tally
from mgpu_core.processes.group import Processes
from mgpu_core.train.grad_buckets import BackwardOrder
from mgpu_core.train.loss import Window
from mgpu_core.train.reducer import Reducer

__all__ = ["ProcessSync", "agree"]

_REASON_COUNT = 200  # characters of a line of another process's error
_NO_LAYOUT = "the gradients could not be laid out in all processes"
_FIRST, _LAYOUT, _FAILURE = "the first backward", "the layout", "a failure"


def agree(processes: Processes, net: Module, optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Compare nets, optimizers and settings of all processes, and take the values of process 0.

    Raises:
        ValueError: processes differ; all of them raise it.
    """
    check_agreement(processes, facts_of(net, optimizer, settings))
    _take_values(processes, net)


def _take_values(processes: Processes, net: Module) -> None:
    processes.send_from(0, [*parameters_of(net), *net.buffers()])


class ProcessSync:
    """A process among those that train together, after all of them have called :func:`agree`.

    Args:
        processes: all of them.
        net: the module of this one.
        optimizer: over its parameters.
        reducer: sums their gradients.

    Attributes:
        count: how many processes there are.
        rows: of a call in all processes, as they have agreed in their first update; means are taken over so many.
    """

    def __init__(self, processes: Processes, net: Module, optimizer: Optimizer, reducer: Reducer) -> None:
        self._processes, self.count = processes, processes.count
        self.rows: float | None = None
        self._net, self._optimizer, self._reducer = net, optimizer, reducer
        self._is_open = self._is_laying_out = False

    def restart(self, settings: Mapping[str, Any]) -> None:
        """Agree again, after all processes have loaded a state; raise as :func:`agree`."""
        self._is_open = False
        agree(self._processes, self._net, self._optimizer, settings)

    def take_values(self) -> None:
        """Copy parameters and buffers of process 0 to all of them."""
        _take_values(self._processes, self._net)

    def first_difference(self) -> tuple[str, int] | None:
        """Return the first parameter that is not the same in all processes, and the first process where it differs."""
        named = list(named_parameters_of(self._net))
        found = self._processes.exchange("parameters", [digest(each) for _, each in named])
        for process, theirs in enumerate(found):
            at = first_difference(found[0], theirs)
            if at is not None:
                return named[at][0], process
        return None

    def open(self) -> None:
        """Take part in the next update from now on, or make it fail."""
        if not self._is_open:
            self._is_open = True
            self._reducer.buckets.open_outbox()

    def learn(self, mine: BackwardOrder, window: Window, standing: Standing) -> BackwardOrder | None:
        """Return one layout for all processes, after their first backward; ``None``: all have joined.

        Args:
            mine: the order of this process's backward.

        Raises:
            Error: a process has given the step up.
            TypeError: sparse gradients.
        """
        words = {"order": mine.order, "sparse": mine.sparse, "wanted": mine.wanted}
        found = self._processes.exchange(_FIRST, words | {"rows": window.rows_seeded, "standing": standing})
        self._refuse_failed(found)
        if all(each["standing"] == Standing.JOINED for each in found):
            self._is_open = False
            return None
        if any(each["sparse"] for each in found):
            self._is_open = False
            raise TypeError("some gradients are sparse: they can be summed inside one process only, so make them dense")
        if rows := sum(each["rows"] for each in found):
            self.rows = rows
            self._reducer.multiply_parts(window.reseed(rows))
        self._is_laying_out = True
        order: list[int] = next((each["order"] for each in found if each["order"]), [])
        return BackwardOrder(order, [], sorted({i for each in found for i in each["wanted"]}), mine.updated)

    def confirm_layout(self) -> None:
        """Wait until all processes have the memory for the layout.

        Raises:
            Error: one has not.
        """
        self._refuse_failed(self._processes.exchange(_LAYOUT, {}))
        self._is_laying_out = False

    def check_all_well(self, error: BaseException | None) -> None:
        """Wait until all processes have loaded their state.

        Raises:
            Error: in another process it did not; ``error`` is the failure in this one.
        """
        found = self._processes.exchange("loading", {} if error is None else {"reason": _reason_of(error)})
        if error is None:
            self._refuse_failed(found)

    def decide(
        self,
        window: Window,
        updates: int,
        standing: Standing,
        settings: Mapping[str, Any],
        interrupted: Callable[[], bool],
    ) -> tuple[Tally, Mapping[str, Any]]:
        """Send this process's ballot; when this returns, all processes update by the same sums.

        Args:
            settings: of this update, in this process.

        Returns:
            The ballots of all, and the settings to update by: this process's, or without data those of one that
            trains.

        Raises:
            Error: a process has given the step up, is gone, or is at another update.
            KeyboardInterrupt: ``interrupted`` said so, while the ballots were under way.
        """
        buckets, used = self._reducer.buckets, self._reducer.used()
        assert buckets.outbox is not None
        settings = dict(settings) | {"hook": self._reducer.communication.hook is not None}
        ballot = Ballot(standing, updates, self._checksum(settings), float(window.weight), used)
        tally = buckets.outbox.cast(ballot, interrupted)
        if Standing.FAILED in tally.standings:
            self._refuse_failed(self._processes.exchange(_FAILURE, {}, interrupted))
        self._is_open = False
        self._check_updates(tally)
        buckets.spread()
        if Standing.JOINED in tally.standings and Standing.TRAINS in tally.standings:
            settings = self._follow_settings(tally, settings, interrupted)
        return tally, settings

    def _checksum(self, settings: Mapping[str, Any]) -> int:
        groups = [numbers_of(group) for group in self._optimizer.param_groups]
        return zlib.crc32(json.dumps([settings, groups]).encode())

    def give_up(self, updates: int, error: BaseException) -> str | None:
        """Tell the others that this process cannot update; return the error that the step raises from now on."""
        if self._is_laying_out and not self._is_open:
            return _NO_LAYOUT
        if not self._is_open or self._processes.lost is not None:
            return self._processes.lost
        reason = {"reason": _reason_of(error)}
        buckets = self._reducer.buckets
        try:
            if self._is_laying_out:
                self._processes.exchange(_LAYOUT, reason)
                return _NO_LAYOUT
            if buckets.is_empty:
                self._processes.exchange(_FIRST, reason)
            elif buckets.outbox is not None and not buckets.outbox.is_cast:
                nothing = [False] * len(self._reducer.used())
                buckets.outbox.cast(Ballot(Standing.FAILED, updates, 0, 0.0, nothing), lambda: False)
                self._processes.exchange(_FAILURE, reason)
            else:
                return "the processes were interrupted while they agreed on an update, and some may have made it"
        except RuntimeError as failed:
            return self._processes.lost or f"the other processes could not be told of a failure ({failed})"
        self._is_open = False
        return None

    def _refuse_failed(self, found: Sequence[Mapping[str, Any]]) -> None:
        for process, words in enumerate(found):
            if "reason" in words:
                self._is_open = False
                raise Error(f"process {process} gave this step up, and so did all: {words['reason']}")

    def _check_updates(self, tally: Tally) -> None:
        if len(set(tally.updates)) > 1:
            made = ", ".join(f"process {process} {count}" for process, count in enumerate(tally.updates))
            raise Error(
                f"the processes have not made the same updates ({made}): all must load the same state, and make as "
                "many steps, or call step.join() when their data is over"
            )
        training = [i for i, standing in enumerate(tally.standings) if standing == Standing.TRAINS]
        if len({tally.settings[i] for i in training}) > 1:
            raise Error(
                "the processes have other settings than each other by now: accumulate, clip_norm, a communication hook "
                "or the optimizer's numbers (a learning rate that follows a process's own loss?) must change in all "
                "alike"
            )

    def _follow_settings(
        self, tally: Tally, settings: Mapping[str, Any], interrupted: Callable[[], bool]
    ) -> Mapping[str, Any]:
        """Take the settings of a process that trains: without data, this one's schedulers have stood still."""
        groups = self._optimizer.param_groups
        counts = [len(group["params"]) for group in groups]
        mine = {"numbers": [numbers_of(group) for group in groups], "counts": counts, "settings": settings}
        found = self._processes.exchange("settings to follow", mine, interrupted)
        theirs = found[tally.standings.index(Standing.TRAINS)]
        if any(each["counts"] != theirs["counts"] for each in found):
            raise Error(
                "the optimizer has other parameter groups than in a process that has joined: groups must change in all "
                "processes, before any of them calls step.join()"
            )
        if tally.standings[self._processes.index] == Standing.TRAINS:
            return settings
        for group, given in zip(groups, theirs["numbers"], strict=True):
            _take(group, given)
        followed: Mapping[str, Any] = theirs["settings"]
        return followed


def _reason_of(error: BaseException) -> str:
    """Return the class, and the first and last line of the message; between them a rank's failure has its traceback."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    said = " ... ".join(line.strip()[:_REASON_COUNT] for line in dict.fromkeys([*lines[:1], *lines[-1:]]))
    return f"{type(error).__name__}: {said}"


def _take(group: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    for name, value in numbers.items():
        own = group.get(name)
        if torch.is_tensor(own):
            own.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value
