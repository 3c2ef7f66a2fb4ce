"""Which tensors may become pointers.

A pointer forgets everything that a tensor knows: that its numbers are lazily conjugated, that it is a view of a tape,
a placeholder without memory, one sample of a vmapped batch.  So each tensor is looked at here before, and either
resolved into plain memory (inputs) or refused with a ``TypeError`` or ``ValueError`` that names the kind.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter
from types import NoneType
from typing import TypeAlias

import torch
from torch._C import _dispatch_keys, _group_tensors_by_device_and_dtype
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor, peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from mgpu_core.devices.shared_memory import overlaps_itself
from mgpu_core.devices.traces import refuse_traces

__all__ = [
    "LiesLike",
    "Memory",
    "are_held_elsewhere",
    "are_blocks",
    "begin_alike",
    "bytes_of",
    "check_alike",
    "check_writable",
    "holders_of",
    "keys_of",
    "memory_of",
    "memory_view",
    "moved_between",
    "plain_keys",
    "plain_memory",
    "readable",
    "refuse_special",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_kind_of, _raw_repr = attrgetter("device.type"), torch._C.DispatchKeySet.raw_repr
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}  # a Buffer is made a Tensor


def refuse_special(tensor: torch.Tensor, name: str, *, sparse: bool = False) -> None:
    """Raise TypeError unless the tensor is ordinary strided memory on a device, or sparse where that is allowed.

    Also in a trace of torch, which would not see writes into such memory.
    """
    refuse_traces()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor, which is not one block of memory")
    if tensor.layout is not torch.strided and not sparse:
        raise TypeError(f"{name} is a sparse tensor ({tensor.layout}): use .to_dense()")
    if is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor):
        raise TypeError(f"{name} is inside a torch.func transform (vmap, grad, ...), which sees no collective")
    usual = torch.Tensor.__torch_dispatch__
    if type(tensor) not in _PLAIN and getattr(type(tensor), "__torch_dispatch__", usual) is not usual:
        raise TypeError(f"{name} is a {type(tensor).__name__}, whose memory is not its own (a fake or wrapper tensor)")
    if tensor.device.type == "meta":
        raise TypeError(f"{name} is on the meta device and has no memory")
    if torch._is_functional_tensor(tensor):
        raise TypeError(f"{name} is inside a trace of torch.compile or torch.export, and has no memory")


_plain_keys: dict[str, frozenset[int]] = {"meta": frozenset()}


def plain_keys(kind: str) -> frozenset[int]:
    """Return the sets of dispatch keys, as numbers, of ordinary tensors on devices of this type.

    A tensor with another set (``keys_of``) is a lazy view, has no memory of its own, is sparse, nested or quantized, or
    is inside a transform; or its class has a dispatch of its own.
    """
    keys = _plain_keys.get(kind)
    if keys is not None:
        return keys
    if peek_interpreter_stack() is not None:
        return frozenset()  # a transform would wrap the examples
    with _disable_current_modes(), torch.inference_mode(False):
        usual = torch.empty(0, device=kind)
        with torch.inference_mode():
            examples = usual, torch.empty(0, device=kind)
    return _plain_keys.setdefault(kind, frozenset(map(keys_of, examples)))


def keys_of(tensor: torch.Tensor) -> int:
    """Return the tensor's set of dispatch keys as a number."""
    return _dispatch_keys(tensor).raw_repr()


def are_blocks(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all of these are contiguous memory, none of it a lazy view, sparse or inside a transform."""
    plain = frozenset[int]().union(*map(plain_keys, set(map(_kind_of, tensors))))
    keys = map(_raw_repr, map(_dispatch_keys, tensors))
    return plain.issuperset(keys) and all(map(torch.Tensor.is_contiguous, tensors))


def readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor as plain memory: conjugation and negation carried out, and zeros written down.

    Raises:
        TypeError: sparse, nested, fake, meta, functorch or wrapper-subclass tensors.
    """
    if type(tensor) in _PLAIN and _dispatch_keys(tensor).raw_repr() in plain_keys(tensor.device.type):
        return tensor
    refuse_special(tensor, name)
    if tensor._is_zerotensor():  # gradients that torch knows to be zero have no memory
        return tensor.clone()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def plain_memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Return the addresses and the numbers of elements of plain tensors; ``None`` where one of these is not plain.

    Plain: contiguous memory, of one real dtype and one device.  The common case of long lists, decided without a name
    and by one loop per question, which the interpreter runs by itself: ten thousand tensors take 4 ms instead of 20.
    """
    try:
        if not _are_alike_and_dense(tensors):
            return None
        pointers, counts = list(map(torch.Tensor.data_ptr, tensors)), list(map(torch.Tensor.numel, tensors))
    except RuntimeError:  # torch gives no address of what has no memory of its own, or gives 0
        return None
    if not all(pointers) and any(count and not pointer for pointer, count in zip(pointers, counts, strict=True)):
        return None
    return pointers, counts


def _are_alike_and_dense(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    return (
        set(map(type, tensors)) <= _PLAIN_TYPES
        and keys_of(first) in plain_keys(first.device.type)
        and not first.is_complex()
        and len(_group_tensors_by_device_and_dtype([[*tensors]], False)) == 1
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(attrgetter("is_nested"), tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
    )


def check_writable(tensors: Sequence[torch.Tensor], names: Callable[[int], str]) -> None:
    """Raise unless plain memory may be written through each of these tensors.

    Args:
        names: returns the name of the tensor at an index, for errors.

    Raises:
        TypeError: as :func:`readable`.
        ValueError: a lazily conjugated or negated view, a tensor whose elements share memory, or a leaf that requires
            grad while grad mode is on (torch would not know of the write).
    """
    refuse_traces()
    if len(tensors) > _FEW and plain_memory(tensors) and not any(map(attrgetter("requires_grad"), tensors)):
        return
    for index, tensor in enumerate(tensors):
        if not _plainly_writable(tensor):
            _check_writable(tensor, names(index))


_FEW = 10  # up to so many, a question at a time costs more than a tensor at a time


def _plainly_writable(tensor: torch.Tensor) -> bool:
    """Return whether it is plain writable memory, as in most calls, without making a name for a message."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.requires_grad
        and _dispatch_keys(tensor).raw_repr() in plain_keys(tensor.device.type)
        and tensor.is_contiguous()
    )


def _check_writable(tensor: torch.Tensor, name: str) -> None:
    refuse_special(tensor, name)
    if tensor._is_zerotensor():
        raise ValueError(f"{name} is a tensor of zeros without memory, and cannot be written: use .clone()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is a lazily conjugated or negated view and cannot be written: use .resolve_conj()")
    if overlaps_itself(tensor):
        raise ValueError(f"{name} has elements that share memory (an expanded tensor) and cannot be written")
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            f"{name} is a leaf that requires grad: it cannot be written in place while grad mode is on; "
            "use torch.no_grad()"
        )


def check_alike(tensors: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise ValueError naming the first rank whose tensor has another shape or dtype."""
    for rank, tensor in enumerate(tensors):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"the tensor of rank {rank} is {tuple(tensor.shape)} {tensor.dtype}, wanted {tuple(shape)} {dtype}"
            )


Memory: TypeAlias = tuple[list[int], list[tuple[int, ...]], list[torch.Size], list[torch.dtype]]


def memory_of(tensors: Sequence[torch.Tensor]) -> Memory:
    """Return where tensors lie and how: equal to an earlier answer as long as they have the same memory."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(torch.Tensor.size, tensors)),  # fewer rows lie where all did
        list(map(attrgetter("dtype"), tensors)),
    )


def begin_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both tensors begin at one address: the first part of a tensor is a view, and no copy."""
    return one.data_ptr() == other.data_ptr()


def moved_between(now: Memory, then: Memory) -> list[int]:
    """Return which tensors lie elsewhere, or in another way, in one answer of :func:`memory_of` than in the other.

    Also of two answers of :func:`mgpu_core.devices.absent_memory.cells_of`.
    """
    if now == then:
        return []
    pairs = zip(zip(*now, strict=True), zip(*then, strict=True), strict=True)
    return [i for i, (one, other) in enumerate(pairs) if one != other]


def holders_of(tensor: torch.Tensor) -> int:
    """Return how many tensors, arrays and handles hold the memory of a tensor, itself among them."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # without the handle made here


def are_held_elsewhere(tensors: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> list[bool]:
    """Return of each tensor whether others than the known ones, or other processes, hold its memory."""
    counts = Counter(each.untyped_storage().data_ptr() for each in known)
    return [
        (tensor.is_cpu and tensor.is_shared()) or holders_of(tensor) > counts[tensor.untyped_storage().data_ptr()]
        for tensor in tensors
    ]


class LiesLike:
    """Compare tensors with others that are looked at once: whether a kernel may read them element by element.

    Args:
        tensors: of one dtype, layout and device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kind = _kind(tensors[0])
        self._is_complex = tensors[0].is_complex()
        self._shapes, self._strides = [each.size() for each in tensors], [each.stride() for each in tensors]

    def holds_for_all(self, columns: Iterable[Sequence[torch.Tensor | None]]) -> bool:
        """Return True if :meth:`holds_for` is of each of these."""
        return all(map(self.holds_for, columns))

    def holds_for(self, others: Sequence[torch.Tensor | None]) -> bool:
        """Return True if all are plain tensors on the first ones' devices, with their strides, or ``None``."""
        shapes, strides, kinds = self._shapes, self._strides, set(map(type, others))
        if NoneType in kinds:
            kinds.remove(NoneType)
            there = [each is not None for each in others]
            shapes, strides = list(compress(shapes, there)), list(compress(strides, there))
            others = list(compress(others, there))
        tensors: Sequence[torch.Tensor] = others  # type: ignore[assignment]
        return (
            kinds <= {torch.Tensor}
            and set(map(_kind, tensors)) <= {self._kind}
            and list(map(torch.Tensor.size, tensors)) == shapes
            and list(map(torch.Tensor.stride, tensors)) == strides
            and True not in map(torch.Tensor.is_neg, tensors)
            and not (self._is_complex and True in map(torch.Tensor.is_conj, tensors))
        )


_kind = attrgetter("layout", "dtype", "device")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in their order: a view of it where it is contiguous."""
    whole = tensor.contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def memory_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of host memory, which must live as long as they are looked at."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
