"""Which tensors may become pointers.

A pointer forgets everything that a tensor knows: that its numbers are lazily conjugated, that it is a view of a tape,
a placeholder without memory, one sample of a vmapped batch.  So each tensor is looked at here before, and either
resolved into plain memory (inputs) or refused with a ``TypeError`` or ``ValueError`` that says what it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import add, attrgetter, itemgetter, le

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

__all__ = [
    "all_plain",
    "check_alike",
    "check_disjoint",
    "check_writable",
    "memory_of",
    "memory_view",
    "readable",
    "refuse_special",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}  # a Buffer is made a Tensor


def refuse_special(tensor: torch.Tensor, name: str, *, sparse: bool = False) -> None:
    """Raises TypeError unless the tensor is ordinary strided memory on a device, or sparse where that is allowed."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor, which is not one block of memory")
    if tensor.layout is not torch.strided and not sparse:
        raise TypeError(f"{name} is a sparse tensor ({tensor.layout}): use .to_dense()")
    if is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor):
        raise TypeError(f"{name} is inside a torch.func transform (vmap, grad, ...), which sees no collective")
    if type(tensor) not in _PLAIN and hasattr(type(tensor), "__torch_dispatch__") and _dispatches(tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, whose memory is not its own (a fake or wrapper tensor)")
    if tensor.device.type == "meta":
        raise TypeError(f"{name} is on the meta device and has no memory")


def _dispatches(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor as plain memory that may be read: conjugation and negation are carried out.

    Raises:
        TypeError: sparse, nested, fake, meta, functorch or wrapper-subclass tensors.
    """
    refuse_special(tensor, name)
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def all_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nobody could object to any of these: contiguous memory, all of one real dtype and one device.

    The common case of long lists, decided without a name and by one loop per question, which the interpreter runs by
    itself: ten thousand tensors take 3 ms instead of 20.
    """
    first = tensors[0]
    return (
        set(map(type, tensors)) <= _PLAIN_TYPES
        and first.device.type != "meta"
        and not first.is_complex()
        and set(map(attrgetter("dtype"), tensors)) == {first.dtype}
        and set(map(attrgetter("device"), tensors)) == {first.device}
        and set(map(attrgetter("layout"), tensors)) == {torch.strided}
        and not any(map(attrgetter("is_nested"), tensors))
        and not any(map(is_functorch_wrapped_tensor, tensors))
        and not any(map(is_legacy_batchedtensor, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
    )


def check_writable(tensors: Sequence[torch.Tensor], names: Callable[[int], str]) -> None:
    """Raises unless plain memory may be written through each of these tensors.

    Args:
        names: what errors call the tensor at a place.

    Raises:
        TypeError: as :func:`readable`.
        ValueError: a lazily conjugated or negated view, a tensor whose elements share memory, or a leaf that requires
            grad while grad mode is on (torch would not know of the write).
    """
    if len(tensors) > _FEW and all_plain(tensors) and not any(map(attrgetter("requires_grad"), tensors)):
        return
    for place, tensor in enumerate(tensors):
        if not _plainly_writable(tensor):
            _check_writable(tensor, names(place))


_FEW = 10  # up to so many, a question at a time costs more than a tensor at a time


def _plainly_writable(tensor: torch.Tensor) -> bool:
    """The common case, decided without a name: most calls are about memory that nobody could object to."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.requires_grad or is_functorch_wrapped_tensor(tensor))
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and tensor.device.type != "meta"
    )


def _check_writable(tensor: torch.Tensor, name: str) -> None:
    refuse_special(tensor, name)
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is a lazily conjugated or negated view and cannot be written: use .resolve_conj()")
    if _overlaps_itself(tensor):
        raise ValueError(f"{name} has elements that share memory (an expanded tensor) and cannot be written")
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            f"{name} is a leaf that requires grad: it cannot be written in place while grad mode is on; "
            "use torch.no_grad()"
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Where torch leaves it open: unless each dimension steps over all that the finer ones reach."""
    found = torch._debug_has_internal_overlap(tensor)
    if found != _OPEN:
        return found == _OVERLAPS
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


_OVERLAPS, _OPEN = 1, 2


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte + 1 that the tensor's elements touch."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def check_disjoint(
    written: Sequence[torch.Tensor], names: Callable[[int], str], read: Sequence[torch.Tensor] = ()
) -> None:
    """Raises if a tensor that is written shares memory with another that is written, or partly with one that is read.

    A tensor that is read and written in place (the very same memory) is fine.

    Raises:
        ValueError: names the two.
    """
    if len(written) == 1:
        _check_apart(written[0], names(0), read)
        return
    if _are_apart([*written, *read]):
        return
    for device in {tensor.device for tensor in written}:  # equal addresses of two devices need not be the same memory
        _check_disjoint_on(
            [(*_extent(tensor), place) for place, tensor in enumerate(written) if _lies_on(tensor, device)],
            _read_elsewhere(
                [tensor for tensor in written if _lies_on(tensor, device)],
                [tensor for tensor in read if _lies_on(tensor, device)],
            ),
            names,
        )


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two of these have an address in common.  Of two devices it need not mean anything if they do."""
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        return False
    begins = list(map(torch.Tensor.data_ptr, tensors))
    extents = sorted(zip(begins, map(add, begins, map(attrgetter("nbytes"), tensors)), strict=True))
    return all(map(le, map(itemgetter(1), extents), map(itemgetter(0), extents[1:])))


def _check_apart(written: torch.Tensor, name: str, read: Sequence[torch.Tensor]) -> None:
    """The same for one that is written, which need not be sorted among the others."""
    if not written.numel():
        return
    begin, end = _extent(written)
    for tensor in read:
        start, stop = _extent(tensor)
        touches = start < end and begin < stop and _lies_on(tensor, written.device)
        if touches and _place(tensor) != _place(written):
            raise ValueError(f"{name} and an input share memory: the result would depend on who writes first")


def _place(tensor: torch.Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Equal for tensors that have the very same elements in the same order."""
    return _extent(tensor), () if tensor.is_contiguous() else tensor.stride()


def _lies_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.numel() > 0


def _read_elsewhere(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> set[tuple[int, int]]:
    """The extents of what is read, but for what is written in place."""
    in_place = set(map(_place, written))
    return {_extent(tensor) for tensor in read if _place(tensor) not in in_place}


def _check_disjoint_on(
    extents: list[tuple[int, int, int]], read: set[tuple[int, int]], names: Callable[[int], str]
) -> None:
    extents = extents + [(begin, end, _INPUT) for begin, end in read]
    reach = {True: (0, _INPUT), False: (0, _INPUT)}  # how far written and read ones went so far, and which one
    for begin, end, place in sorted(extents):
        is_written = place != _INPUT
        for other_is_written, (other_end, other) in reach.items():
            if begin < other_end and (is_written or other_is_written):
                one, two = ("an input" if each == _INPUT else names(each) for each in (other, place))
                raise ValueError(f"{one} and {two} share memory: the result would depend on who writes first")
        reach[is_written] = max(reach[is_written], (end, place))


_INPUT = -1


def check_alike(tensors: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> None:
    """Raises ValueError naming the first rank whose tensor has another shape or dtype."""
    for rank, tensor in enumerate(tensors):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"the tensor of rank {rank} is {tuple(tensor.shape)} {tensor.dtype}, wanted {tuple(shape)} {dtype}"
            )


def memory_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[tuple[int, ...]], list[torch.dtype]]:
    """Where tensors lie and how: equal to an earlier answer for as long as nobody has given them other memory."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(attrgetter("dtype"), tensors)),
    )


def memory_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of host memory, which must live as long as they are looked at."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
