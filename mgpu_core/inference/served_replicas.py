"""The copies of a module that answer requests: one per rank, compiled or recorded as CUDA graphs where asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from mgpu_core.devices.graphs import CudaRecorder, Recordings
from mgpu_core.devices.transfer import module_to
from mgpu_core.inference.calls_at_once import CallsAtOnce
from mgpu_core.inference.requests import Request, form_of, key_of
from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.lost import LostAttributes
from mgpu_core.parallel.first_calls.shared import SharedObjects
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.comparison import any_in_half
from mgpu_core.trees.layer_holders import still_reached
from mgpu_core.trees.module_copy import copy_module, give_attributes, set_compiled
from mgpu_core.trees.module_tree import tensors_of
from mgpu_core.trees.moves import is_spread
from mgpu_core.trees.nested import Tree, flatten, map_leaves

__all__ = ["GraphedModule", "Replica", "replicas_of"]

_WATCHED = 3  # first calls of a replica
_KEPT_APART = "each device's copy keeps its own value, and an answer that reads it depends on the requests before"
_SHARED = (
    "all copies share it, and code that reads it finds what another request has left. Keep it in an attribute of the "
    "module"
)
_KEPT = 16  # graphs of a replica; the one that was not used for the longest time goes first


class Replica:
    """A rank's module, in eval mode and without gradients.

    Args:
        module: the copy.
        method: the name of the method that answers.
        graphs: runs it as CUDA graphs; ``None``: it is called itself.
        refusals: of all ranks: why no further call is made, once one has written a parameter.
        at_once: where several workers call it at once.

    Attributes:
        devices: of its parameters and buffers.
        is_half: it computes in half precision.
        is_compiled: a part of it runs compiled code.
    """

    def __init__(
        self,
        module: Module,
        method: str,
        graphs: GraphedModule | None,
        refusals: list[str],
        at_once: CallsAtOnce | None = None,
    ) -> None:
        self.module, self._graphs, self._refusals, self._at_once = module, graphs, refusals, at_once
        self._method = getattr(module, method)
        self.devices = {each.device for each in tensors_of(module)}
        self.is_half = any_in_half(module.parameters())
        self.is_compiled = any(vars(each).get("_compiled_call_impl") is not None for each in module.modules())
        self._tables = [table for each in module.modules() for table in (each._parameters, each._buffers) if len(table)]
        lost = LostAttributes(consequence=_KEPT_APART)
        of_hooks = SharedObjects(of_hooks=True, consequence=_SHARED)
        self._first_calls = FirstCalls((lost, _WATCHED), (of_hooks, _WATCHED)) if at_once is None else FirstCalls()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request, *, captured: bool) -> Any:
        """Return the outputs.

        Args:
            args, kwargs: of the module.
            request: one of those of the call.
            captured: all tensors among them have rows, so that the call may be a CUDA graph.

        Raises:
            RuntimeError: the module wrote or replaced a buffer or a parameter, so that answers would depend on the
                requests before; of a parameter also in later calls.
        """
        if self._refusals:
            raise RuntimeError(self._refusals[0])
        before = self._tensors()
        versions = [each._version for each in before]
        watched = self._first_calls.begin(Call(self.module, [self.module])) if self._first_calls.go_on else None
        call: Callable[..., Any] = self._graphs if captured and self._graphs is not None else self._method
        try:
            with NULL_CONTEXT if self._at_once is None else self._at_once.call(request.branch):
                outputs = call(*args, **kwargs)
        except BaseException:
            self._written(before, versions)
            raise
        if text := self._written(before, versions):
            raise RuntimeError(text)
        if watched is not None:
            self._first_calls.end(watched)
        return outputs

    def _tensors(self) -> list[torch.Tensor]:
        return [each for table in self._tables for each in table.values() if each is not None]

    def _written(self, before: list[torch.Tensor], versions: list[int]) -> str:
        """Return the error for a call that has written its module; empty: it has not.  A parameter ends all calls."""
        now = self._tensors()
        if list(map(id, now)) == list(map(id, before)) and [each._version for each in now] == versions:
            return ""
        unchanged = {id(each) for each, version in zip(before, versions, strict=True) if each._version == version}
        buffers, parameters = self.module.named_buffers(), self.module.named_parameters()
        named = [*(("buffer", *each) for each in buffers), *(("parameter", *each) for each in parameters)]
        kind, name = next(((kind, name) for kind, name, each in named if id(each) not in unchanged), ("buffers", ""))
        which = f"{kind} {name!r}" if name else kind
        text = (
            f"the forward of {type(self.module).__name__} writes its {which} in eval mode: an answer would depend on "
            "the requests before it, and on their device. If it does so in its first call alone, call the module once "
            "in eval mode before the Predictor is made. Where each call does (rotary frequencies that follow the "
            "length, as of longrope), it cannot be served: call it in a lock of your own"
        )
        if kind == "parameter":
            self._refusals.append(text)
        return text


def replicas_of(
    net: Module, devices: Sequence[torch.device], method: str, *, compiled: Mapping[str, Sequence[Any]], captured: bool
) -> list[Replica]:
    """Return a copy of the module per rank; ranks of one device share parameters, and no buffers.

    Of a module that is on several devices all ranks share one copy.

    Args:
        net: the module.
        devices: one per rank.
        method: the name of the method that answers.
        compiled: by the names of modules, per rank a function of its copy and the arguments.
        captured: record CUDA graphs.

    Raises:
        TypeError: an attribute that cannot be copied.
    """
    copies: list[Module] = []
    with torch.inference_mode(False), torch.no_grad():  # versions of buffers are counted outside inference mode alone
        for rank, device in enumerate(devices[:1] if is_spread(net) else devices):
            shared: dict[int, Any] = {}
            if device in devices[:rank]:
                first = copies[devices.index(device)].parameters()
                shared = {id(own): other for own, other in zip(net.parameters(), first, strict=True)}
            module = copy_module(net, shared)
            copies.append(module if is_spread(module) else module_to(module, device))
            if not rank:
                _warn_if_shared(net, module)
            give_attributes(net.buffers(), copies[-1].buffers())
            copies[-1].requires_grad_(False).eval()
            set_compiled(copies[-1], compiled, rank)
    _wait_for(copies)
    if is_spread(net):
        at_once = CallsAtOnce(copies[0]) if len(devices) > 1 else None
        return [Replica(copies[0], method, None, [], at_once)] * len(devices)
    name, refusals = type(net).__name__, list[str]()
    return [
        Replica(copied, method, GraphedModule(copied, device, name) if captured else None, refusals)
        for copied, device in zip(copies, devices, strict=True)
    ]


def _warn_if_shared(net: Module, copied: Module) -> None:
    path = still_reached(copied, set(map(id, net.modules())))
    if path is not None:
        warn_user(
            f"{path} of {type(net).__name__} reaches the module itself, by a closure, a weak reference or a helper "
            "with such: copies share that layer, in the mode that it has. Reach layers by attributes of the module"
        )


def _wait_for(modules: Sequence[Module]) -> None:
    """Wait until the copies are made: workers use other streams than this thread.

    Only for the streams of this thread: a wait for a whole device would invalidate a recording of another thread.
    """
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for device in {each.device for each in tensors} - {torch.device("cpu")}:
        torch.accelerator.current_stream(device).synchronize()


class _RecordedCall(NamedTuple):
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
        self._recorder, self._recordings = CudaRecorder(), Recordings[_RecordedCall](_KEPT)
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, in memory of their own."""
        leaves: list[Any] = []
        tree = flatten((args, kwargs), leaves, "inputs")
        rows = next(leaf.size(0) for leaf in leaves if isinstance(leaf, torch.Tensor))
        size = 1 << (rows - 1).bit_length()
        key = (size, form_of(tree), *map(key_of, leaves))
        recorded = self._recordings.get(key)
        if recorded is None and self._recordings.reason is None:
            recorded = self._record(key, tree, leaves, size)
        if recorded is None:
            return self._module(*args, **kwargs)
        for static, leaf in zip(recorded.leaves, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                static[:rows].copy_(leaf)
        recorded.graph.replay()
        return map_leaves(recorded.outputs, lambda leaf: _first_rows(leaf, rows, size))

    @torch.inference_mode(False)  # random generators would keep a state that later recordings of training cannot write
    @torch.no_grad()
    def _record(self, key: Hashable, tree: Tree, leaves: Sequence[Any], size: int) -> _RecordedCall | None:
        """Record the calls of a kind; return ``None``, with a warning once, if that fails."""
        static = [
            leaf.new_zeros((size, *leaf.shape[1:])) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        args, kwargs = tree.unflatten(iter(static))
        self._module(*args, **kwargs)  # chooses kernels, and allocates their memory, outside the graph
        outputs: list[Any] = []

        def work() -> list[torch.Tensor]:
            outputs.append(self._module(*args, **kwargs))
            return []

        recorded = self._recordings.add(
            key, lambda: _RecordedCall(self._recorder.record(self._device, work)[0], static, outputs[0])
        )
        if recorded is None:
            self._recorder.forget()
            if not self._has_warned:
                self._has_warned = True
                reason = self._recordings.reason
                warn_user(f"{self._name} runs as it is, not as a CUDA graph: {reason}", RuntimeWarning)
        return recorded


def _first_rows(leaf: Any, rows: int, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (leaf[:rows] if leaf.dim() and leaf.size(0) == size else leaf).clone()
