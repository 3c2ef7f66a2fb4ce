"""``TensorLoader``: shuffled batches of tensors that lie in memory, without Python code per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mgpu_core.devices.transfer import to_device
from mgpu_core.kernels import gather_rows

__all__ = ["TensorLoader", "batches_of"]

CUT_NBYTES = 2 * 1024 * 1024
"""The size of the float32 rows that are cut at once: they stay in the processor's cache until they are used."""


class TensorLoader:
    """Iterate over batches of tensors that fit in memory::

        for images, labels in TensorLoader(images, labels, batch_size=64, shuffle=True, scale=1 / 255): ...

    Bytes become float32 by :func:`mgpu_core.kernels.gather_rows`: ``rows * scale + shift``, picked and converted in one
    pass; tensors of other dtypes are indexed.  One call cuts several batches where they are small.

    Args:
        tensors: with one number of rows along dimension 0, on one device, where the batches are made.
        batch_size: rows of a batch; the last one has the rest.
        shuffle: a new order for each iteration, from ``generator`` (default: torch's of the CPU).
        drop_last: leave out a last batch that has fewer rows.
        scale, shift: of tensors of bytes.

    Raises:
        ValueError: no tensor, other numbers of rows or devices, a batch size below 1.
    """

    def __init__(
        self,
        *tensors: torch.Tensor,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        scale: float = 1 / 255,
        shift: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        rows = {tuple(tensor.shape[:1]) for tensor in tensors}
        if len(rows) != 1 or rows == {()}:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
            raise ValueError(f"tensors must have one number of rows along dimension 0, not the shapes {shapes}")
        if len({tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"tensors must be on one device, not {', '.join(str(each.device) for each in tensors)}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        self.tensors, self.batch_size = tensors, batch_size
        self._shuffle, self._generator = shuffle, generator
        self._scale, self._shift = scale, shift
        count = len(tensors[0])
        self._rows = count - count % batch_size if drop_last else count

    def __len__(self) -> int:
        return -(-self._rows // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        count = len(self.tensors[0])
        order = torch.arange(count, device="cpu")
        if self._shuffle:
            order = torch.randperm(count, generator=self._generator, device="cpu")
        order = to_device(order[: self._rows], self.tensors[0].device)
        return batches_of(self.tensors, order, self.batch_size, self._scale, self._shift)


def batches_of(
    tensors: Sequence[torch.Tensor], order: torch.Tensor, batch: int, scale: float, shift: float
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return the rows of the tensors in this order, ``batch`` at a time; several batches are cut by one kernel call.

    Args:
        order: int64, ``(any,)``, on the device of the tensors.
        scale, shift: of tensors of bytes, which become float32.
    """
    numbers = max(sum(tensor[:1].numel() for tensor in tensors), 1)
    rows = batch * max(1, CUT_NBYTES // (4 * batch * numbers))
    for some in torch.split(order, rows):
        columns = [
            gather_rows(tensor, some, scale=scale, shift=shift) if tensor.dtype == torch.uint8 else tensor[some]
            for tensor in tensors
        ]
        yield from zip(*(torch.split(column, batch) for column in columns), strict=True)
