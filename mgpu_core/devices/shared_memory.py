"""Which tensors share memory: a written tensor must not overlap another argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add, attrgetter, itemgetter, le

import torch

__all__ = ["check_disjoint", "overlaps_itself"]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory: some dimension does not step over all that the finer ones reach."""
    overlap = torch._debug_has_internal_overlap(tensor)
    if overlap != _OPEN:
        return overlap == _OVERLAPS
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


_OVERLAPS, _OPEN = 1, 2


def check_disjoint(
    written: Sequence[torch.Tensor], names: Callable[[int], str], read: Sequence[torch.Tensor] = ()
) -> None:
    """Raise if a tensor that is written shares memory with another that is written, or partly with one that is read.

    A tensor that is read and written in place (the very same memory) is fine.  So are those that lie between each
    other's elements, as columns of a matrix do.

    Raises:
        ValueError: names the two.
    """
    if len(written) == 1:
        _check_apart(written[0], names(0), read)
    elif not _are_apart([*written, *read]):
        in_place = set(map(_index, written))
        elsewhere = list({index: each for each in read if (index := _index(each)) not in in_place}.values())
        for device in {tensor.device for tensor in written}:  # one address on two devices need not be the same memory
            _check_disjoint_on(device, written, elsewhere, names)


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no two of these have an address in common; between devices that need not mean anything."""
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        return False
    begins = list(map(torch.Tensor.data_ptr, tensors))
    extents = sorted(zip(begins, map(add, begins, map(attrgetter("nbytes"), tensors)), strict=True))
    return all(map(le, map(itemgetter(1), extents), map(itemgetter(0), extents[1:])))


def _check_apart(written: torch.Tensor, name: str, read: Sequence[torch.Tensor]) -> None:
    """Check one tensor that is written against all others."""
    if not written.numel():
        return
    begin, end = _extent(written)
    for tensor in read:
        start, stop = _extent(tensor)
        touches = start < end and begin < stop and _lies_on(tensor, written.device)
        if touches and _index(tensor) != _index(written) and _share(written, tensor):
            _refuse(name, _INPUT)


def _check_disjoint_on(
    device: torch.device, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], names: Callable[[int], str]
) -> None:
    """Go along the addresses, and looks at each tensor with those that have begun before it and reach beyond."""
    tensors = [*written, *read]
    open_: list[tuple[int, int]] = []  # where it ends, and which one it is
    for begin, end, index in sorted((*_extent(t), i) for i, t in enumerate(tensors) if _lies_on(t, device)):
        open_ = [each for each in open_ if each[0] > begin]
        for _, other in open_:
            if min(index, other) < len(written) and _share(tensors[other], tensors[index]):
                _refuse(*(names(each) if each < len(written) else _INPUT for each in (other, index)))
        open_.append((end, index))


_INPUT = "an input"


def _refuse(one: str, two: str) -> None:
    raise ValueError(f"{one} and {two} share memory: the result would depend on who writes first")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte + 1 that the tensor's elements touch."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _index(tensor: torch.Tensor) -> tuple[tuple[int, int], int, tuple[int, ...]]:
    """Return a key that is equal for tensors with the same elements of memory in the same order, whatever the dtype."""
    return _extent(tensor), tensor.itemsize, () if tensor.is_contiguous() else tensor.stride()


def _lies_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.numel() > 0


def _share(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping extents have a byte in common, or may have, if that is costly."""
    if one.is_contiguous() and two.is_contiguous():
        return True
    steps: dict[int, tuple[int, int]] = {}  # in bytes: by how many of them a byte of one may be from one of the other
    for tensor, sign in ((one, 1), (two, -1)):
        for stride, end in _steps(tensor):
            first, last = steps.get(stride, (0, 0))
            steps[stride] = (first + min(0, sign * end), last + max(0, sign * end))
    return _reaches(two.data_ptr() - one.data_ptr(), sorted(steps.items(), reverse=True))


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the strides in bytes, and the largest number of steps of each."""
    nbytes = tensor.element_size()
    dims = [(1, nbytes), *((stride * nbytes, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))]
    return [(stride, size - 1) for stride, size in dims if stride and size > 1]


def _reaches(distance: int, steps: Sequence[tuple[int, tuple[int, int]]]) -> bool:
    """Return whether multiples of the strides add up to the distance; large strides first, they leave little choice."""
    if not steps:
        return distance == 0
    (stride, (first, last)), rest = steps[0], steps[1:]
    least, most = (sum(step * ends[side] for step, ends in rest) for side in (0, 1))
    choice = range(max(first, -((most - distance) // stride)), min(last, (distance - least) // stride) + 1)
    return len(choice) > _MANY or any(_reaches(distance - stride * times, rest) for times in choice)


_MANY = 8  # multiples of one stride: more than rows and columns of one matrix leave, and soon looked through
