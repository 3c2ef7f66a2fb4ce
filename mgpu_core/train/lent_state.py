"""The optimizer's state where it lies in shards: shown while somebody looks at it, and taken back."""

from __future__ import annotations

from typing import Any

import torch

from mgpu_core.optim.flat_buffers import shaped
from mgpu_core.train.shown_state import ShownState

__all__ = ["LentState"]


class LentState(ShownState):
    """Counts of steps alone, but for the time that somebody looks; no tensor is the whole of a kind.

    Args:
        optimizer: over some or all of ``parameters``.
        parameters: of the user's module, by place.
        flat: the first device's buckets.
        devices: each has its shard of the state.
    """

    def forget(self) -> None:
        """What lies in the shards is worth nothing: what the optimizer has, counts."""
        super().forget()
        # What the optimizer holds of each parameter between two looks, and the tensors that are lent to it in one:
        # whatever else is found there, somebody else has put there.
        self._stripped: dict[int, dict[str, Any]] = {}
        self._lent: dict[int, dict[str, torch.Tensor]] = {}

    def find_views(self) -> None:
        """There is no tensor that could be shown."""

    def show(self, i: int, group: dict[str, Any]) -> None:
        """Gives the optimizer a parameter's count of steps."""
        super().show(i, group)
        self._stripped[i] = self._optimizer.state[self._parameters[i]]

    def _has_left(self, i: int, state: dict[str, Any]) -> bool:
        lent = self._lent.get(i, {})
        if state is not self._stripped.get(i):
            return False  # somebody has reset it
        kinds = self._devices[0].states  # what else is there, is the user's own, or torch's count of steps
        return all(kind not in kinds or (kind in lent and value is lent[kind]) for kind, value in state.items())

    def lend(self) -> None:
        """Lends the optimizer the whole state, for as long as it is looked at; what the user has reset, stays so."""
        for i in self.places:
            state = self._left(i)
            if state is not None:
                self._lend(i, state)

    def _left(self, i: int) -> dict[str, Any] | None:
        """What the optimizer holds of a parameter, if that is what was left there; ``None``: somebody has reset it."""
        found: dict[str, Any] | None = self._optimizer.state.get(self._parameters[i])
        return found if found is self._stripped.get(i) else None

    @torch.no_grad()
    def _lend(self, i: int, state: dict[str, Any]) -> None:
        parameter = self._parameters[i]
        for kind in self._devices[0].states:
            if kind in state:
                continue
            flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            for device in self._devices:
                device.bring(i, kind, flat)
            state[kind] = self._lent.setdefault(i, {})[kind] = shaped(flat, 0, parameter)

    def give_away(self) -> None:
        """What is lent stays with the optimizer: from now on what it shows counts."""
        self._lent.clear()

    def take_back(self) -> None:
        """Takes back what was lent."""
        for i, lent in self._lent.items():
            state = self._left(i)
            if state is not None:  # another dict, because a state_dict() holds the one that there was
                left = {kind: value for kind, value in state.items() if kind not in lent}
                self._optimizer.state[self._parameters[i]] = self._stripped[i] = left
        self._lent.clear()

    def take_all(self) -> None:
        """Takes all that the optimizer shows: it lies in the shards now, whoever has put it there."""
        self._lent = {i: dict.fromkeys(self._devices[0].states, torch.empty(0)) for i in self.places}
        self.take_back()
