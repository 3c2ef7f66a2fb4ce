"""The copies of a module that answer requests: one per rank, compiled or recorded as CUDA graphs where asked for."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from mgpu_core._warnings import warn_user
from mgpu_core.device.transfer import module_to
from mgpu_core.inference.requests import form_of, key_of
from mgpu_core.nested import Tree, flatten, map_leaves
from mgpu_core.pipeline.placement import is_spread
from mgpu_core.train.graph_cache import CudaRecorder, FailedRecordings

__all__ = ["GraphedModule", "Replica", "replicas_of"]

_KEPT = 16  # graphs of a replica; the one that was not used for the longest time goes first


class Replica:
    """A rank's module, in eval mode and without gradients.

    Attributes:
        module: the copy.
    """

    def __init__(self, module: Module, call: Callable[..., Any]) -> None:
        self.module, self._call = module, call
        self._buffers = dict(module.named_buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs.

        Raises:
            RuntimeError: the module wrote a buffer, so that answers would depend on the requests before.
        """
        before = [each._version for each in self._buffers.values()]
        outputs = self._call(*args, **kwargs)
        if before != [each._version for each in self._buffers.values()]:
            pairs = zip(self._buffers.items(), before, strict=True)
            names = [name for (name, buffer), version in pairs if buffer._version != version]
            raise RuntimeError(
                f"the forward of {type(self.module).__name__} writes its buffer {names[0]!r} in eval mode: an answer "
                "would depend on the requests before it, and on their device"
            )
        return outputs


def replicas_of(
    net: Module, devices: Sequence[torch.device], *, compiled: Sequence[Callable[..., Any]], captured: bool
) -> list[Replica]:
    """Return a copy of the module per rank; ranks of one device share parameters, and no buffers.

    Args:
        net: the module.
        devices: one per rank.
        compiled: per rank a function of its copy and the arguments; empty: the copies are called themselves.
        captured: record CUDA graphs.
    """
    made: list[Module] = []
    with torch.inference_mode(False), torch.no_grad():  # versions of buffers are counted outside inference mode alone
        for rank, device in enumerate(devices):
            memo: dict[int, Any] = {}
            if device in devices[:rank]:
                shared = made[devices.index(device)].parameters()
                memo = {id(own): other for own, other in zip(net.parameters(), shared, strict=True)}
            module = copy.deepcopy(net, memo)
            made.append(module if is_spread(module) else module_to(module, device))
            made[-1].requires_grad_(False).eval()
    _wait_for(made)
    calls: list[Callable[..., Any]] = [*made]
    if compiled:
        calls = [partial(call, module) for call, module in zip(compiled, made, strict=True)]
    if captured:
        name = type(net).__name__
        calls = [GraphedModule(call, device, name) for call, device in zip(calls, devices, strict=True)]
    return list(map(Replica, made, calls))


def _wait_for(modules: Sequence[Module]) -> None:
    """Wait until the copies are made: workers use other streams than this thread.

    Only for the streams of this thread: a wait for a whole device would invalidate a recording of another thread.
    """
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for device in {each.device for each in tensors} - {torch.device("cpu")}:
        torch.accelerator.current_stream(device).synchronize()


class _Recorded(NamedTuple):
    graph: Any
    leaves: list[Any]  # arguments that the graph reads; tensors are filled before a replay
    outputs: Any


class GraphedModule:
    """A module on one GPU whose calls are replays of CUDA graphs, one per form of the arguments.

    A graph has a power of two of rows: a batch is copied into its first rows, and the outputs' other rows are left out.
    So the module must treat rows apart.  A call that cannot be recorded runs as it is, with one warning.

    Args:
        module: what is called: a module, or its compiled call.
        device: of its tensors.
        name: of the module, for messages.
    """

    def __init__(self, module: Callable[..., Any], device: torch.device, name: str) -> None:
        self._module, self._device, self._name = module, device, name
        self._recorder, self._failed = CudaRecorder(), FailedRecordings()
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, in memory of their own."""
        leaves: list[Any] = []
        tree = flatten((args, kwargs), leaves, "inputs")
        rows = next(leaf.size(0) for leaf in leaves if isinstance(leaf, torch.Tensor))
        size = 1 << (rows - 1).bit_length()
        key = (size, form_of(tree), *map(key_of, leaves))
        if key not in self._recorded and (self._failed.why_not(key) or not self._record(key, tree, leaves, size)):
            return self._module(*args, **kwargs)
        self._recorded.move_to_end(key)
        recorded = self._recorded[key]
        for static, leaf in zip(recorded.leaves, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                static[:rows].copy_(leaf)
        recorded.graph.replay()
        return map_leaves(recorded.outputs, lambda leaf: _first_rows(leaf, rows, size))

    @torch.inference_mode(False)  # random generators would keep a state that later recordings of training cannot write
    @torch.no_grad()
    def _record(self, key: Hashable, tree: Tree, leaves: Sequence[Any], size: int) -> bool:
        """Record the calls of a kind; return whether that went well."""
        static = [
            leaf.new_zeros((size, *leaf.shape[1:])) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        args, kwargs = tree.unflatten(iter(static))
        self._module(*args, **kwargs)  # chooses kernels, and allocates their memory, outside the graph
        outputs: list[Any] = []

        def work() -> list[torch.Tensor]:
            outputs.append(self._module(*args, **kwargs))
            return []

        try:
            graph, _ = self._recorder.record(self._device, work)
        except RuntimeError as error:
            self._recorder.forget()
            reason = self._failed.add(key, error)
            if not self._has_warned:
                self._has_warned = True
                warn_user(f"{self._name} runs as it is, not as a CUDA graph: {reason}", RuntimeWarning)
            return False
        self._recorded[key] = _Recorded(graph, static, outputs[0])
        if len(self._recorded) > _KEPT:
            self._recorded.popitem(last=False)
        return True


def _first_rows(leaf: Any, rows: int, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (leaf[:rows] if leaf.dim() and leaf.size(0) == size else leaf).clone()
