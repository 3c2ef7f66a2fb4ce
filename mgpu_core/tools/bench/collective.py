"""A collective in a few words, and numbers whose result is known in closed form.

Rank r starts with (i + r + salt) mod 11 at element i, so a sum, product, minimum or maximum over the ranks is again a
function of i mod 11: eleven numbers, computed by Python, are the whole truth. They are small and whole, so every dtype
holds them exactly and the comparison is for equality. 11 is prime, so with up to ten ranks no two elements of a period
agree in all that matters, and the salt changes from check to check, so that memory left by another run is not mistaken
for a result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mgpu_core.tools.bench.case import Bound, Case

PERIOD = 11
MOST_RANKS = 24
"""Sums stay below 256, which bfloat16 still holds exactly."""

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")

Tensors = Sequence[torch.Tensor | None]
"""The results, one entry per rank, None for a rank without."""


@dataclass(frozen=True)
class TeamTask:
    """The numbers of one row: `count` elements in what each rank gives or gets, as nccl-tests prints it.

    `devices`: one per rank; empty: the CPU.
    """

    ranks: int
    count: int
    dtype: str = "float32"
    op: str = "sum"
    algorithm: str = "auto"
    devices: tuple[str, ...] = ()

    def device(self, rank: int) -> str:
        """Return where a rank's tensors are."""
        return self.devices[rank] if self.devices else "cpu"

    def tiny(self) -> "TeamTask":
        """Return the same with one element."""
        return replace(self, count=1)


class Values:
    """The inputs and the results of one task; views, to be copied and compared, not written."""

    def __init__(self, task: TeamTask, chunks: int) -> None:
        """`chunks`: how many of them a rank holds at most."""
        self.task = task
        self.salt = 0
        factor = task.ranks if task.op == "avg" else 1  # so that the mean is a whole number
        first = [1 + (i == 0) for i in range(PERIOD)] if task.op == "prod" else [i * factor for i in range(PERIOD)]
        self._folds = [
            _fold([first[(i + rank) % PERIOD] for rank in range(task.ranks)], task.op) for i in range(PERIOD)
        ]
        self._inputs = self._repeat(first, chunks)

    def of(self, rank: int, chunk: int = 0, chunks: int = 1) -> torch.Tensor:
        """Return the tensor that `rank` starts with, `chunks` chunks of it from `chunk` on."""
        return self._cut(self._inputs, rank + chunk * self.task.count, chunks)

    def folded(self, chunk: int = 0) -> torch.Tensor:
        """Return the reduction over all ranks, one chunk of it."""
        return self._cut(self._repeat(self._folds, 1), chunk * self.task.count, 1)

    def joined(self) -> torch.Tensor:
        """Return the tensors that all ranks start with, one behind the other."""
        return torch.cat([self.of(rank) for rank in range(self.task.ranks)])

    def _repeat(self, table: list[int], chunks: int) -> torch.Tensor:
        count = chunks * self.task.count + PERIOD
        return torch.tensor(table, dtype=getattr(torch, self.task.dtype)).repeat(math.ceil(count / PERIOD))

    def _cut(self, whole: torch.Tensor, shift: int, chunks: int) -> torch.Tensor:
        begin = (shift + self.salt) % PERIOD
        return whole[begin : begin + chunks * self.task.count]


Wanted = Callable[[Values, int], torch.Tensor | None]
"""From the values of a task and a rank to what that rank ends with."""


def around(ranks: int) -> float:
    """2(n-1)/n: each byte of an all-reduce crosses a link twice, but for a rank's own share."""
    return 2 * (ranks - 1) / ranks


def others(ranks: int) -> float:
    """(n-1)/n: a rank's own share stays where it is."""
    return (ranks - 1) / ranks


def whole(_ranks: int) -> float:
    """1: every byte crosses each link once."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class TeamCase:
    """One collective and the three ways to do it.

    All but the in-place ones return fresh memory, for every contestant alike, as a forward pass does.

    Attributes:
        name: of the case.
        summary: one line.
        position: `in` or `out` of place, as in nccl-tests.
        split: the size of nccl-tests counts the chunks of all ranks together.
        bus_factor: ranks to busbw / algbw.
        sends: a rank's tensor at the start; an empty one for nothing.
        wanted: a rank's tensor at the end; None for nothing.
        ours: task and tensors of all ranks to the results of all ranks, by mgpu_core.
        loop: the same in plain torch.
        gloo: task, rank and its tensor to its result, by torch.distributed.
        ops: reductions that `--op` may name; the first is the default. Empty: it moves only.
        algorithms: of ours, that `--algorithm` may name. Empty: there is one.
        bounds, repeats: of its case.
    """

    name: str
    summary: str
    position: str = "out"
    split: bool = True
    bus_factor: Callable[[int], float] = others
    sends: Callable[[Values, int], torch.Tensor] = lambda values, rank: values.of(rank)
    wanted: Wanted
    ours: Callable[[TeamTask, Sequence[torch.Tensor]], Tensors]
    loop: Callable[[TeamTask, Sequence[torch.Tensor]], Tensors]
    gloo: Callable[[TeamTask, int, torch.Tensor], torch.Tensor | None]
    ops: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = ()
    repeats: int = Case.repeats


class Holding:
    """The tensors that one process holds: those of all ranks (ours, the torch loop), or of one (gloo)."""

    def __init__(self, collective: TeamCase, task: TeamTask, ranks: Sequence[int]) -> None:
        self.task = task
        self._collective, self._ranks = collective, ranks
        self._values = Values(task, task.ranks if collective.split else 1)
        self.sends = [collective.sends(self._values, rank).to(task.device(rank), copy=True) for rank in ranks]

    def reset(self) -> None:
        """Fresh inputs: a collective in place has overwritten them, and its sums would grow without end."""
        for rank, send in zip(self._ranks, self.sends, strict=True):
            send.copy_(self._collective.sends(self._values, rank))

    def wrong(self, work: Callable[[], Tensors], salt: int, wanted: Wanted | None = None) -> int:
        """Do the work on inputs with this salt and count the elements that differ from the closed form.

        Args:
            work: gives the results of all ranks.
            salt: of the inputs.
            wanted: the tensor that a rank should end with; None: the collective's.
        """
        self._values.salt = salt
        self.reset()
        results = work()
        rule = wanted or self._collective.wanted
        return sum(_differ(rule(self._values, rank), got) for rank, got in zip(self._ranks, results, strict=True))


def _differ(wanted: torch.Tensor | None, result: torch.Tensor | None) -> int:
    if wanted is None or result is None or result.shape != wanted.shape or result.dtype != wanted.dtype:
        return 0 if wanted is None and result is None else 1
    return int((result.cpu() != wanted.cpu()).sum())


def _fold(values: list[int], op: str) -> int:
    if op in ("sum", "avg"):
        return sum(values) // (len(values) if op == "avg" else 1)
    if op == "prod":
        return math.prod(values)
    return min(values) if op == "min" else max(values)
