"""The buffers of all ranks' modules, which a forward may write into, and put other tensors in the place of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Module

from mgpu_core.device.tensor_checks import memory_questions
from mgpu_core.look import Look

__all__ = ["RankBuffers"]

_Found = tuple[Module, str, torch.Tensor | None]


class RankBuffers:
    """Rank 0's buffers are the user's own; those of the others are copies, current before each forward.

    Args:
        own: all modules of the user's.
        places: per rank of its modules those in the same places; of a rank that runs the user's own ``own`` itself.
        devices: per rank where it computes.
    """

    def __init__(self, own: Sequence[Module], places: Sequence[Sequence[Module]], devices: Sequence[torch.device]):
        self._own, self._places, self._devices = own, places, devices

    def mirror(self) -> None:
        """Gives all ranks the user's buffers, as a forward over replicas would; those that come and go, too."""
        own = list(_found_in(self._own))
        names = [name for _, name, _ in own]
        for places, device in zip(self._places, self._devices, strict=True):
            if places is not self._own:
                theirs = list(_found_in(places))
                if [name for _, name, _ in theirs] != names:
                    for module, twin in zip(self._own, places, strict=True):
                        _name_alike(module, twin)
                    theirs = list(_found_in(places))
                _copy(own, theirs, device)

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Of all ranks."""
        return [buffer for places in self._places for _, _, buffer in _found_in(places)]

    def look(self) -> Look:
        """Over as soon as one of a rank's is another tensor, or lies elsewhere."""
        of_modules = [module._buffers for places in self._places for module in places]
        tensors = [each for each in self.tensors if each is not None and each.layout is torch.strided]
        return Look(of_modules, [(each, "dtype") for each in tensors], memory_questions(tensors))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a recording, which computes nothing: forwards may write into buffers, and not replace them.

        Raises:
            RuntimeError: one was replaced; the old ones are back.
        """
        before = [each for places in self._places for each in _found_in(places)]
        replaced = []
        try:
            yield
        finally:
            for module, name, buffer in before:
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                    replaced.append(name)
        if replaced:
            raise RuntimeError(f"the forward puts another tensor in the place of buffer {replaced[0]}")


def _found_in(modules: Sequence[Module]) -> Iterator[_Found]:
    for module in modules:
        for name, buffer in module._buffers.items():
            yield module, name, buffer


def _name_alike(module: Module, twin: Module) -> None:
    """Makes the twin's buffers have the module's names; those that are new have no tensor yet."""
    if list(module._buffers) != list(twin._buffers):
        found = {name: twin._buffers.get(name) for name in module._buffers}
        twin._buffers.clear()
        twin._buffers.update(found)
        twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name in found:
            vars(twin).pop(name, None)  # an attribute that it was before


def _copy(sources: Sequence[_Found], targets: Sequence[_Found], device: torch.device) -> None:
    fitting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for (_, _, source), (module, name, target) in zip(sources, targets, strict=True):
        if source is target:
            continue
        taken = fitting.get(id(target))
        is_free = taken is None or taken[1] is source  # else two names had one buffer, and now each has its own
        if source is not None and target is not None and is_free and _are_alike(source, target):
            fitting[id(target)] = target, source
        else:
            module._buffers[name] = None if source is None else _fresh(source, device)
    if fitting:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in fitting.values()], [source for _, source in fitting.values()])


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one can be copied into the other."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return one.layout is torch.strided or one._nnz() == other._nnz()


def _fresh(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # steps to come will write it
        return source.detach().to(device, copy=True)
