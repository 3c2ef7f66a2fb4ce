"""The table of optimizers: one row says all that tells one from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ADAM", "LION", "SGD", "Rule", "table_of"]

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """One optimizer.

    Attributes:
        kernel: of a group, the name that :class:`mgpu_core.kernels.FlatKernel` knows.
        settings: entries of a group, in the order of the kernel's table; a pair takes two columns.
        states: kinds of state in the order of the kernel's arguments, and which groups need them.
        counts_steps: whether torch keeps a count of steps with them.
        alike: settings in which all groups must agree, because they choose the kernel.
    """

    kernel: Callable[[Group], str]
    settings: tuple[str, ...]
    states: Mapping[str, Callable[[Group], bool]]
    counts_steps: bool
    alike: tuple[str, ...] = ()

    def settings_of(self, groups: Sequence[Group]) -> list[list[Any]]:
        """Return the settings per group as plain numbers and tuples of them.

        A tensor's number is read at each call, because schedulers write into it; on a GPU that waits.
        """
        rows = [[group[name] for name in self.settings] for group in groups]
        for row in rows:
            for column, value in enumerate(row):
                kind = type(value)
                if kind is tuple and type(value[0]) is float and type(value[1]) is float:
                    continue
                if kind not in _NUMBERS:
                    row[column] = _plain(value)
        return rows

    def check_alike(self, groups: Sequence[Group]) -> None:
        """Raise ValueError if groups differ in an option that chooses the kernel, or one is differentiable."""
        for name in self.alike:
            if len({bool(group.get(name)) for group in groups}) > 1:
                raise ValueError(f"all groups must have the same {name}: one kernel updates them; use torch.optim's")
        if any(group.get("differentiable") for group in groups):
            raise ValueError("differentiable=True is for torch.optim's own classes: kernels leave no graph")

    def kinds(self, groups: Sequence[Group]) -> list[str]:
        """Return the kinds of state that some of the groups need."""
        return [kind for kind, is_needed in self.states.items() if any(map(is_needed, groups))]


_NUMBERS = (float, int, bool)


def _plain(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)


def table_of(settings: Sequence[Sequence[Any]]) -> torch.Tensor:
    """Return the group table that the kernels read: float64, ``(groups, 6)``."""
    rows = []
    for group_settings in settings:
        row = [float(one) for value in group_settings for one in (value if isinstance(value, tuple) else (value,))]
        rows.append(row + [0.0] * (6 - len(row)))
    return torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(len(rows), 6)


def _always(_: Group) -> bool:
    return True


SGD = Rule(
    kernel=lambda _: "sgd",
    settings=("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    states={"momentum_buffer": lambda group: bool(group["momentum"])},
    counts_steps=False,
)
ADAM = Rule(
    kernel=lambda group: "adamw" if group.get("decoupled_weight_decay") else "adam",
    settings=("lr", "betas", "eps", "weight_decay", "maximize"),
    states={"exp_avg": _always, "exp_avg_sq": _always, "max_exp_avg_sq": lambda group: bool(group["amsgrad"])},
    counts_steps=True,
    alike=("amsgrad", "decoupled_weight_decay"),
)
LION = Rule(
    kernel=lambda _: "lion",
    settings=("lr", "betas", "weight_decay", "maximize"),
    states={"exp_avg": _always},
    counts_steps=False,
)
