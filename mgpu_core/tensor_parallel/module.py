"""``TensorParallel``: a whole module, its layers cut over several devices by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn import Module, Parameter

from mgpu_core.comm.autograd import broadcast_buckets
from mgpu_core.comm.trace_hooks import trace_backward
from mgpu_core.devices.devices import DeviceLike, as_devices
from mgpu_core.devices.exclusive import Exclusive
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.devices.transfer import copy_into, to_device
from mgpu_core.ranks.compiled import outside_the_compiler
from mgpu_core.ranks.modes import check_modes
from mgpu_core.ranks.random import RankStream, random_numbers_kept
from mgpu_core.ranks.run import Run
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.tensor_parallel.draws import DrawnAlone, MetDraws, SameNumbers
from mgpu_core.tensor_parallel.generate import arguments_of_ranks, is_generate
from mgpu_core.tensor_parallel.given import refuse_hooks
from mgpu_core.tensor_parallel.objects import PLAIN
from mgpu_core.tensor_parallel.plan import WeightCut, read_plan
from mgpu_core.tensor_parallel.proof import Proof, arguments
from mgpu_core.tensor_parallel.rank_views import RankViews
from mgpu_core.trace import tracer
from mgpu_core.trace.events import ALL_RANKS
from mgpu_core.trace.tracer import in_span, span
from mgpu_core.trees.module_copy import copy_module, leaf_like
from mgpu_core.trees.module_tree import check_initialised, modules_of
from mgpu_core.trees.moves import is_spread, refuse_moves
from mgpu_core.trees.nested import RankParts, Replicate, Rows, flatten, map_leaves, tensors_in, unwrapped
from mgpu_core.trees.weights import Weights, weights_of

__all__ = ["TensorParallel"]


class _Kept(NamedTuple):
    """A Parameter of the module that was given.

    Attributes:
        names: all that it has there.
        shape: the whole one's.
        cut: how it is cut; ``None``: it is not.
        parts: per rank one, or the only one on the first device.
    """

    names: list[str]
    shape: tuple[int, ...]
    cut: WeightCut | None
    parts: list[Parameter]

    def whole(self, first: torch.device) -> torch.Tensor:
        """Return the whole tensor on a device, in memory of its own."""
        if self.cut is None:
            return self.parts[0].detach().clone()
        return self.cut.joined([to_device(each.detach(), first) for each in self.parts])


class TensorParallel(Module):
    """Cut the layers of a module over several devices by a plan: each device computes all rows with its part.

    Each rank runs the module's own code in a thread, on a view of the module whose planned layers hold a part of their
    Parameters; ranks meet after layers whose outputs must be joined.  There is one graph over all devices, so an
    ordinary loop trains it.  All other Parameters are on the first device, and each call copies them to the ranks.

    The Parameters are those of ``parameters()``: one per part, and the others.  The module that was given is emptied:
    its Parameters are on meta, its forward raises, and so does an optimizer that was made for it.  All
    ranks see changes to it, of modes, hooks or attributes, in the next call; Parameters cannot be added.

    Random numbers, such as those of dropout, are the same in all ranks: rank 0's are those that the module alone would
    draw.  Between a column and a row each rank has this mask for its own heads or features, so a net that draws there
    in training is not the module alone.

    Args:
        net: the module.
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`.
        plan: from names of layers or Parameters, where ``*`` is one part between dots, to ``column``, ``row``,
            ``column_gathered``, ``vocab``, ``packed_column``, or the words of transformers; ``None``: the plan that the
            module brings (``tp_plan`` of the models of transformers).
        weights, rename: as for :func:`mgpu_core.place`; each part reads its slice of the file.

    Raises:
        TypeError: not a module.
        ValueError: no plan, or one that does not fit the module and the ranks; a module that is on several devices
            already.  Nothing was changed then.

    Attributes:
        module: the module that was given.
    """

    weights: Module
    module: Module

    def __init__(
        self,
        net: Module,
        device_ids: Sequence[DeviceLike],
        plan: Mapping[str, str] | None = None,
        *,
        weights: str | PathLike[str] | None = None,
        rename: Callable[[str], str | None] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(net, Module):
            raise TypeError(f"net must be a torch.nn.Module, not {type(net).__name__}")
        if is_spread(net):
            raise ValueError("the module's parts are on several devices already: make it anew")
        self.device_ids = list(as_devices(device_ids))
        check_initialised([*net.parameters(), *net.buffers()], net)
        self._plan = read_plan(net, plan, len(self.device_ids))
        refuse_hooks(net)
        files = weights_of(net, weights, rename)
        self._team = Team.of(self.device_ids)
        self.training = net.training
        self._at_work = Exclusive("another thread's call of this TensorParallel did not end")
        self._numbers = SameNumbers(type(net).__name__, self.device_ids)
        self.weights = Module()
        self._kept = self._keep(net)
        self._by_name = {name: kept for kept in self._kept.values() for name in kept.names}
        self._proof = Proof(net, self._plan) if len(self.device_ids) > 1 else None
        self._refusal: str | None = None
        self._ranks = RankViews(net, self._team, self._plan, {key: kept.parts for key, kept in self._kept.items()})
        buffers = {id(buffer): _on(self.device_ids[0], buffer) for buffer in self._ranks.tree.buffers}
        if files is not None:
            self._load(files, {name: buffers[id(each)] for name, each in net.named_buffers(remove_duplicate=False)})
        self.__dict__["module"] = net
        self._ranks.empty(buffers)
        for name, module in net.named_modules():  # its buffers are among our own
            if module._buffers:
                owner = self._named(name)
                owner._buffers = module._buffers
                owner._non_persistent_buffers_set = module._non_persistent_buffers_set

    to = to_empty = cpu = cuda = ipu = mtia = xpu = refuse_moves

    def _keep(self, net: Module) -> dict[int, _Kept]:
        """Make the Parameters, on their devices, under the names of the module; return them by the given one's id."""
        kept: dict[int, _Kept] = {}
        devices = self.device_ids
        for name, parameter in net.named_parameters(remove_duplicate=False):
            if id(parameter) in kept:
                kept[id(parameter)].names.append(name)
                continue
            path, _, last = name.rpartition(".")
            owner = self._named(path)
            cut = self._plan.cuts.get(name)
            if cut is None:
                parts = [leaf_like(parameter, _on(devices[0], parameter))]
                owner._parameters[last] = parts[0]
            else:
                tensors = [_on(device, cut.part(parameter, rank, len(devices))) for rank, device in enumerate(devices)]
                parts = [leaf_like(parameter, part) for part in tensors]
                owner._modules[last] = torch.nn.ParameterList(parts)
            kept[id(parameter)] = _Kept([name], tuple(parameter.shape), cut, parts)
        return kept

    def _named(self, path: str) -> Module:
        """Return our module of this name, which has Parameters and buffers alone; made where it is not there."""
        owner = self.weights
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner._modules[part] = Module()
            owner = owner.get_submodule(part)
        return owner

    @torch.no_grad()
    def _load(self, files: Weights, buffers: Mapping[str, torch.Tensor]) -> None:
        """Read each tensor of the files: each part its slice."""
        kept, ranks = self._by_name, len(self.device_ids)
        for name, file, key in files.tensors():
            if name not in kept:
                copy_into(buffers[name], file.get_tensor(key))
                continue
            cut = kept[name].cut
            for rank, part in enumerate(kept[name].parts):
                copy_into(part, file.get_tensor(key) if cut is None else cut.part(file.get_slice(key), rank, ranks))

    def train(self, mode: bool = True) -> TensorParallel:
        """Set the mode of the module, and so of all ranks."""
        super().train(mode)
        self.module.train(mode)
        return self

    @outside_the_compiler
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module in all ranks, and return rank 0's output, on the first device.

        A cache that comes back stands for those of all ranks: pass it in again.

        Raises:
            Error: ranks that come to different layers; two threads of which one waits too long for the other.
            Exception: a rank raised it, as in :func:`mgpu_core.parallel_apply`.
        """
        return self._run("__call__", inputs, [kwargs] * len(self.device_ids))

    @outside_the_compiler
    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Run a method of the module in all ranks, and return rank 0's result: ``tp.call("generate", ids)``.

        Rank 0 draws random numbers for all ranks where torch's functions draw them.  In ``generate`` of transformers
        streamers, stopping criteria and logits processors are called on rank 0 alone.
        """
        net, ranks = self.module, len(self.device_ids)
        getattr(net, method)
        if is_generate(net, method) and ranks > 1:
            return self._run(method, (), arguments_of_ranks(net, unwrapped(inputs), unwrapped(kwargs), ranks))
        return self._run(method, inputs, [kwargs] * ranks)

    def _run(self, method: str, inputs: Any, kwargs: Sequence[Any]) -> Any:
        check_modes()
        if self._refusal is not None:
            raise ValueError(self._refusal)
        with self._at_work:
            try:
                return self._called(method, inputs, kwargs)
            finally:
                self._ranks.objects.given.clear()

    def _called(self, method: str, inputs: Any, kwargs: Sequence[Any]) -> Any:
        with NULL_CONTEXT if tracer.sink is None else span("tensor_parallel"):
            views, stand_ins = self._ranks.of_call()
            nets = [row[0] for row in views]
            watch: Any = NULL_CONTEXT if self._proof is None else self._proof.seen(nets)
            arguments = self._on_ranks(inputs, kwargs)
            with self._numbers.of_call(method, self._ranks.tree.modes) as (numbers, drawn), watch as seen:
                calls = [
                    partial(_called, net, method, of_rank, stream, drawn, rank)
                    for rank, (net, of_rank, stream) in enumerate(zip(nets, arguments, numbers, strict=True))
                ]
                results = self._results(calls, seen)
        self._ranks.keep(views, stand_ins)
        self._ranks.objects.end(results)
        if seen is not None and seen[0]:
            self._prove(seen)
        return results[0]

    def _results(self, calls: Sequence[Callable[[], Any]], seen: Sequence[Mapping[str, Any]] | None) -> list[Any]:
        """Run the calls of all ranks, which meet, and return their results."""
        if tracer.sink is not None:
            pairs = zip(enumerate(self.device_ids), calls, strict=True)
            calls = [partial(in_span, "forward", *place, call) for place, call in pairs]
        run = Run(self._team)
        try:
            results = run.run(calls, draws=None, workers="threads")
        except BaseException as error:  # after Ctrl-C ranks are still at work
            run.stop(time_limit())
            if seen is not None and seen[0]:
                error.add_note(
                    f"the last block of cut layers that had begun is {list(seen[0])[-1]}: if the module alone "
                    "takes these arguments, its code counts heads or features that a rank has a part of"
                )
            raise
        if tracer.recording is not None:
            trace_backward(ALL_RANKS, tensors_in(results[0]))
        return results

    @torch.no_grad()
    def _prove(self, seen: Sequence[Mapping[str, Any]]) -> None:
        """Compare each block that a call has run with the same block uncut, in eval mode; ValueError if it differs."""
        proof = self._proof
        assert proof is not None, "calls are watched for it"
        views, _ = self._ranks.of_call()
        self._ranks.objects.give_copies(views)
        nets = [row[0].eval() for row in views]
        with random_numbers_kept(self.device_ids):
            for name in seen[0]:
                self._refusal = self._refusal or self._difference(proof, name, nets, [each[name] for each in seen])
        if not proof.is_open:
            self._proof = None
        if self._refusal is not None:
            raise ValueError(self._refusal)

    def _difference(self, proof: Proof, name: str, nets: Sequence[Module], seen: Sequence[Any]) -> str | None:
        """Return how a cut block differs from the uncut one, on random rows."""
        given = [arguments(each) for each in seen]
        if any(each is None for each in given):
            return None
        run, block = Run(self._team), self._whole(name).eval()
        called = partial(_called, block, "__call__")
        calls = [
            partial(_called, net.get_submodule(name), "__call__", of_rank)
            for net, of_rank in zip(nets, given, strict=True)
        ]
        try:
            whole = called(arguments(seen[0]))
            cut = run.run(calls, draws=None, workers="threads")[0]
        except Exception:  # it does not run alone
            run.stop(time_limit())
            proof.tried(name)
            return None
        return proof.judge(name, block, (whole, cut), lambda: called(arguments(seen[0])))

    def _on_ranks(self, inputs: Any, kwargs: Sequence[Any]) -> list[Any]:
        """Return the arguments of each rank: tensors on its device, objects of its own."""
        graph: dict[int, list[torch.Tensor]] = {}
        devices = self.device_ids

        def on(rank: int, leaf: Any) -> Any:
            device = devices[rank]
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and torch.is_grad_enabled():
                    if id(leaf) not in graph:
                        graph[id(leaf)] = [row[0] for row in broadcast_buckets(devices, [leaf], numbered=False)]
                    return graph[id(leaf)][rank]
                if leaf.device != device:
                    return to_device(leaf, device)
                return leaf.clone() if rank else leaf
            if isinstance(leaf, torch.device):
                return device if leaf == devices[0] else leaf
            if isinstance(leaf, Replicate | Rows | RankParts):
                return map_leaves(unwrapped(leaf), partial(on, rank))
            is_shared = not rank or isinstance(leaf, PLAIN) or callable(leaf)
            return leaf if is_shared else self._ranks.objects.of_rank(rank, leaf)

        nests: dict[int, tuple[Any, list[Any]]] = {}  # by the ids of the kwargs, which ranks may share
        of_ranks = []
        for rank, given in enumerate(kwargs):
            if id(given) not in nests:
                values: list[Any] = []
                nests[id(given)] = flatten((inputs, given), values, "inputs", whole=True), values
            tree, leaves = nests[id(given)]
            of_ranks.append(tree.unflatten(iter([on(rank, leaf) for leaf in leaves])))
        return of_ranks

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the module alone, by its names, on the first device; only tied ones share memory."""
        wholes = {name: whole for kept in self._kept.values() for whole in [kept.whole(self.device_ids[0])]
                  for name in kept.names}  # fmt: skip
        state = self.module.state_dict(keep_vars=True)
        return {name: wholes[name] if name in wholes else _cloned(entry) for name, entry in state.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of the module alone into the parts, and its buffers.

        Raises:
            ValueError: names that are missing or surplus, or tensors of another shape; nothing was copied then.
        """
        kept = self._by_name
        entries = self.module.state_dict(keep_vars=True)
        wanted = {name: kept[name].shape if name in kept else _shape_of(entry) for name, entry in entries.items()}
        given = {name: _shape_of(each) for name, each in state.items()}
        if wrong := [name for name in wanted | given if wanted.get(name) != given.get(name)]:
            raise ValueError(f"the state does not fit, by its names or shapes: {', '.join(wrong[:5])}")
        for name, shape in wanted.items():
            if name not in kept:
                if shape is not None:  # extra states are those of the module
                    copy_into(entries[name], state[name])
                continue
            cut = kept[name].cut
            for rank, part in enumerate(kept[name].parts):
                copy_into(part, state[name] if cut is None else cut.part(state[name], rank, len(self.device_ids)))

    def uncut(self) -> Module:
        """Return the module alone, with copies of all tensors on the first device."""
        return self._whole("")

    def _whole(self, name: str) -> Module:
        """Return a module of ours alone, with copies of all its tensors."""
        block, first = self.module.get_submodule(name), self.device_ids[0]
        kept = [(id(parameter), self._kept[id(parameter)]) for parameter in block.parameters()]
        copied = copy_module(block, {key: leaf_like(each.parts[0], each.whole(first)) for key, each in kept})
        self._ranks.give_forward(modules_of(copied))
        return copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Change dtypes; raise RuntimeError, before anything changes, if a part would leave its device."""
        if any(fn(torch.empty(0, device=device)).device != device for device in self.device_ids):
            refuse_moves()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a TensorParallel cannot be copied: make another of a module, such as tp.uncut()")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TensorParallel cannot be pickled: save tp.full_state_dict()")

    def extra_repr(self) -> str:
        """Return the devices, and how much is cut."""
        names = ", ".join(map(str, self.device_ids))
        return f"device_ids=[{names}], {len(self._plan.cuts)} of {len(self._kept)} parameters cut"

    def __repr__(self) -> str:
        return f"TensorParallel({type(self.module).__name__}, {self.extra_repr()})"


def _called(
    net: Module,
    method: str,
    arguments: Any,
    stream: RankStream | None = None,
    drawn: DrawnAlone | None = None,
    rank: int = 0,
) -> Any:
    """Run a method in a rank's thread."""
    args, kwargs = arguments
    call = net if method == "__call__" else getattr(net, method)
    with NULL_CONTEXT if stream is None else stream.entered():
        if method == "__call__" or drawn is None:  # or no rank may draw others
            return call(*args, **kwargs)
        with MetDraws(rank, drawn):
            return call(*args, **kwargs)


def _cloned(entry: Any) -> Any:
    """Return a copy of an entry of a state, which may be a module's own extra state."""
    return entry.detach().clone() if isinstance(entry, torch.Tensor) else entry


def _shape_of(entry: Any) -> tuple[int, ...] | None:
    return tuple(entry.shape) if isinstance(entry, torch.Tensor) else None


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on a device, with memory of its own."""
    tensor = tensor.detach()
    if tensor.is_meta:  # it is read from a file
        return torch.empty_like(tensor, device=device)
    if tensor.device == device:
        return tensor.clone(memory_format=torch.contiguous_format)
    return to_device(tensor, device)
