"""What the rungs work on: the tensors of one run, their reference, and how many values are wrong.

Inputs are small whole numbers, so every sum and product is exact and a right result is equal, not close. Outputs and
scratch buffers are poisoned before each run, and outputs have a guard on both sides that must keep its poison. The
`shifts` say by how many elements the arrays stand behind a multiple of 16 bytes, in turn: (1,) all by one, (0, 1) every
other one, so that they are never aligned together.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, cycle

import torch

from mgpu_core import kernels
from mgpu_core.kernels import reference

GUARD = 16
"""Poisoned elements on each side of an output."""
POISON = {torch.float32: float("nan"), torch.float16: float("nan"), torch.uint8: 255}
SCALE, SHIFT = 0.5, -3.0
"""Of the ladder's arithmetic: exact in every dtype, also in another order."""

Step = Callable[[], object]


class Memory:
    """Fresh memory on a device, each array by the next of the shifts after an aligned address."""

    def __init__(self, device: torch.device, shifts: Sequence[int]) -> None:
        self._device, self._shifts = device, cycle(shifts)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An array of so many elements."""
        shift = next(self._shifts)
        return torch.empty(shift + count, dtype=dtype, device=self._device)[shift:]


def whole_numbers(tensor: torch.Tensor, salt: int) -> None:
    """Fills it with 0 to 12, in another order for every salt."""
    tensor.copy_((torch.arange(tensor.numel(), device=tensor.device) * 7 + salt) % 13)


class Output:
    """Where a rung writes, between two guards."""

    def __init__(self, memory: Memory, count: int, dtype: torch.dtype) -> None:
        self._guarded = memory.empty(count + 2 * GUARD, dtype)
        self.inside = self._guarded[GUARD : GUARD + count]

    def poison(self) -> None:
        """So that what nobody writes is wrong."""
        self._guarded.fill_(POISON[self._guarded.dtype])

    def wrong(self, wanted: torch.Tensor) -> int:
        """Values that are not as wanted, and guards that were written to."""
        guards = torch.cat([self._guarded[:GUARD], self._guarded[GUARD + len(self.inside) :]])
        return int((self.inside != wanted).sum()) + int((~guards.isnan()).sum())


class PackProblem:
    """Tensors of one dtype into a flat one of another, scaled."""

    kernel = "pack"

    def __init__(
        self,
        counts: Sequence[int],
        device: torch.device,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        shifts: Sequence[int] = (0,),
    ) -> None:
        self.counts, self.dtypes, self.scale = list(counts), dtypes, SCALE
        self.begins = list(accumulate(counts, initial=0))[:-1]
        self.count = sum(counts)
        self.device, memory = device, Memory(device, shifts)
        self.tensors = [memory.empty(count, dtypes[0]) for count in counts]
        self.scratch = memory.empty(self.count, dtypes[0])
        self.output = Output(memory, self.count, dtypes[1])

    @property
    def nbytes(self) -> int:
        """Needed: every element read once and written once."""
        return self.count * sum(dtype.itemsize for dtype in self.dtypes)

    def moved(self, rung: str) -> int:
        """What a rung reads and writes: all but the last write and read the scratch buffer too."""
        return self.nbytes + (0 if rung == "fused" else 2 * self.count * self.dtypes[0].itemsize)

    def shipped(self) -> Step:
        """The kernel of the package, on the same tensors."""
        out, dtype = self.output.inside, self.dtypes[1]
        return lambda: kernels.pack(self.tensors, dtype=dtype, scale=self.scale, out=out)

    def reset(self, salt: int) -> None:
        """Fresh inputs, poisoned memory."""
        for position, tensor in enumerate(self.tensors):
            whole_numbers(tensor, salt + position)
        self.scratch.fill_(POISON[self.dtypes[0]])
        self.output.poison()

    def wrong(self) -> int:
        """Wrong values and touched guards."""
        return self.output.wrong(reference.pack(self.tensors, self.scale, self.dtypes[1]))


class SumProblem:
    """The tensors of several ranks into one."""

    kernel = "sum_ranks"

    def __init__(
        self,
        count: int,
        ranks: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        shifts: Sequence[int] = (0,),
    ) -> None:
        self.count, self.ranks, self.dtype, self.device = count, ranks, dtype, device
        memory = Memory(device, shifts)
        self.tensors = [memory.empty(count, dtype) for _ in range(ranks)]
        self.scratch = memory.empty(count, torch.float32)
        self.output = Output(memory, count, dtype)

    @property
    def nbytes(self) -> int:
        """Needed: every rank read once, the sum written once."""
        return self.count * self.dtype.itemsize * (self.ranks + 1)

    def moved(self, rung: str) -> int:
        """What a rung reads and writes: all but the last write the running sum after each rank but one, and read it."""
        return self.nbytes + (0 if rung == "fused" else 2 * self.count * self.scratch.itemsize * (self.ranks - 1))

    def shipped(self) -> Step:
        """The kernel of the package, on the same tensors."""
        return lambda: kernels.sum_ranks(self.tensors, out=self.output.inside)

    def reset(self, salt: int) -> None:
        """Fresh inputs, poisoned memory."""
        for rank, tensor in enumerate(self.tensors):
            whole_numbers(tensor, salt + 5 * rank)
            tensor[::7] = (2048, 1, 1)[rank % 3]  # 2048 + 1 is 2048 in float16: it shows who rounds twice
        self.scratch.fill_(POISON[torch.float32])
        self.output.poison()

    def wrong(self) -> int:
        """Wrong values and touched guards."""
        return self.output.wrong(reference.sum_ranks(self.tensors, "sum"))


class GatherProblem:
    """Rows of bytes by index into a normalised batch."""

    kernel = "gather_rows"

    def __init__(
        self,
        rows_count: int,
        row_count: int,
        batch: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        shifts: Sequence[int] = (0,),
    ) -> None:
        self.row_count, self.batch, self.dtype, self.device = row_count, batch, dtype, device
        self.scale, self.shift_by = SCALE, SHIFT
        memory = Memory(device, shifts)
        self.rows = memory.empty(rows_count * row_count, torch.uint8).view(rows_count, row_count)
        self.index = torch.empty(batch, dtype=torch.int64, device=device)
        self.picked = memory.empty(batch * row_count, torch.uint8)
        self.output = Output(memory, batch * row_count, dtype)

    @property
    def nbytes(self) -> int:
        """Needed: an index and a row of bytes read, a row of numbers written."""
        return self.batch * (8 + self.row_count * (1 + self.dtype.itemsize))

    def moved(self, rung: str) -> int:
        """What a rung reads and writes: all but the last write and read a batch of bytes too."""
        return self.nbytes + (0 if rung == "fused" else 2 * self.picked.numel())

    def shipped(self) -> Step:
        """The kernel of the package, on the same tensors."""
        out = self.output.inside.view(self.batch, self.row_count)
        return lambda: kernels.gather_rows(self.rows, self.index, scale=SCALE, shift=SHIFT, dtype=self.dtype, out=out)

    def reset(self, salt: int) -> None:
        """Fresh inputs in an order that no cache foresees, poisoned memory."""
        self.rows.copy_((torch.arange(self.rows.numel(), device=self.device) * 7 + salt).view_as(self.rows) % 251)
        generator = torch.Generator().manual_seed(salt)
        self.index.copy_(torch.randint(len(self.rows), (self.batch,), generator=generator))
        self.picked.fill_(POISON[torch.uint8])
        self.output.poison()

    def wrong(self) -> int:
        """Wrong values and touched guards."""
        wanted = reference.gather_rows(self.rows, self.index, scale=SCALE, shift=SHIFT, dtype=self.dtype)
        return self.output.wrong(wanted.reshape(-1))


Problem = PackProblem | SumProblem | GatherProblem
