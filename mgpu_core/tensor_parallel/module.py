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
from mgpu_core.optim.flat_buffers import holders
from mgpu_core.ranks.compiled import outside_the_compiler
from mgpu_core.ranks.modes import check_modes
from mgpu_core.ranks.random import RankStream, random_numbers_kept
from mgpu_core.ranks.run import Run
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.tensor_parallel.draws import DrawnAlone, MetDraws, SameNumbers
from mgpu_core.tensor_parallel.generate import arguments_of_ranks, is_generate
from mgpu_core.tensor_parallel.meetings import CHANGED, cut_layer
from mgpu_core.tensor_parallel.objects import PLAIN, Objects, tensors_held
from mgpu_core.tensor_parallel.plan import WeightCut, read_plan
from mgpu_core.tensor_parallel.proof import Proof, arguments
from mgpu_core.trace import tracer
from mgpu_core.trace.events import ALL_RANKS
from mgpu_core.trees.module_copy import copy_module, leaf_like
from mgpu_core.trees.module_tree import check_initialised, missing_attribute
from mgpu_core.trees.moves import is_spread, refuse_moves
from mgpu_core.trees.nested import RankParts, Replicate, Rows, flatten, map_leaves, tensors_in, unwrapped
from mgpu_core.trees.views import attributes_of
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


class _Slot(NamedTuple):
    """Where a lane finds a Parameter that is not cut: a table of a module, a name, and which of these Parameters."""

    table: dict[str, Any]
    name: str
    number: int


class _RankCopy(NamedTuple):
    """A rank's copy of the module.

    Attributes:
        net: the copy; its Parameters that are cut are the rank's parts.
        modules: all of its modules.
        slots: where copies of the others go in each call.
    """

    net: Module
    modules: list[Module]
    slots: list[_Slot]


class TensorParallel(Module):
    """Cut the layers of a module over several devices by a plan: each device computes all rows with its part.

    Each rank runs the module's own code in a thread, with a copy of the module whose planned layers hold a part of
    their Parameters; ranks meet after layers whose outputs must be joined.  There is one graph over all devices, so an
    ordinary loop trains it.  All other Parameters are on the first device, and each call copies them to the ranks.

    The Parameters are those of ``parameters()``: one per part, and the others.  The module that was given is emptied:
    its Parameters are on meta, its forward raises, and so does an optimizer that was made for it.

    Random numbers, such as those of dropout, are the same in all ranks: rank 0's are those that the module alone would
    draw.  Between a column and a row each rank has this mask for its own heads or features, so a net that draws there
    in training is not the module alone.

    Args:
        net: the module.
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`.
        plan: from names of layers or Parameters, where ``*`` is one part between dots, to ``column``, ``row``,
            ``column_gathered``, ``vocab``, ``packed_column``, or the words of transformers; ``None``: the plan that the
            module brings (``tp_plan`` of the models of transformers), or that of its family, of those without one.
        weights, rename: as for :func:`mgpu_core.place`; each part reads its slice of the file.

    Raises:
        TypeError: not a module.
        ValueError: no plan, or one that does not fit the module and the ranks; a module that is on several devices
            already.  Nothing was changed then.
    """

    weights: Module
    _source: Module

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
        _refuse_hooks(net)
        files = weights_of(net, weights, rename)
        self._team = Team.of(self.device_ids)
        self.training = net.training
        self._at_work = Exclusive("another thread's call of this TensorParallel did not end")
        self._objects = Objects(self.device_ids)
        self._numbers = SameNumbers(type(net).__name__, self.device_ids)
        self.weights = Module()
        self._kept = self._keep(net)
        self._by_name = {name: each for each in self._kept.values() for name in each.names}
        self._uncut = [each.parts[0] for each in self._kept.values() if each.cut is None]
        self._lanes = [self._lane(net, rank) for rank in self._team.ranks]
        self._proof = Proof(net, self._plan) if len(self._lanes) > 1 else None
        self._refusal: str | None = None
        self._share_buffers()
        holders.add(self)
        if files is not None:
            self._load(files)
        self.__dict__["_source"] = _emptied(net)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            way = '.uncut().{name}(...) of a whole copy, or .call("{name}", ...), which runs it with the parts'
            raise missing_attribute(self, name, self.__dict__.get("_source"), way, ".uncut().{name}") from None

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

    def _lane(self, net: Module, rank: int) -> _RankCopy:
        """Return a rank's copy of the module, whose layers meet the other ranks.

        It lives on: attributes, buffers and hooks with a state are each rank's own from call to call.
        """
        device = self.device_ids[rank]
        shared: dict[int, Any] = {
            key: kept.parts[0 if kept.cut is None else rank] for key, kept in self._kept.items()
        } | {id(each): _on(device, each) for each in net.buffers()}
        first = self.device_ids[0]
        held = tensors_held([attributes_of(module) for module in net.modules()]) if device != first else []
        here = {id(tensor): to_device(tensor.detach(), device) for tensor in held if tensor.device == first}
        copied = copy_module(net, here | shared)
        modules = dict(copied.named_modules(remove_duplicate=False))
        slots = []
        for number, kept in enumerate(each for each in self._kept.values() if each.cut is None):
            for name in kept.names:
                owner, _, last = name.rpartition(".")
                slots.append(_Slot(modules[owner]._parameters, last, number))
        counts = {
            name: [part.shape[kept.cut.dim] for part in kept.parts]
            for name, kept in self._by_name.items()
            if kept.cut is not None
        }
        for name, word in self._plan.layers.items() if len(self.device_ids) > 1 else ():
            cut_layer(modules[name], name, word, rank, counts.get(f"{name}.weight", []))
        for name, heads in self._plan.heads.items():
            modules[name].__dict__.update({each: count // len(self.device_ids) for each, count in heads.items()})
        for module in copied.modules():
            if isinstance(module, torch.nn.TransformerEncoderLayer):
                module.register_forward_hook(lambda *_: None)  # without one it may read its layers' weights itself
        return _RankCopy(copied, list(copied.modules()), slots)

    @property
    def held(self) -> list[torch.Tensor]:
        """The Parameters that are not cut as the ranks' copies have them: some share memory with our own."""
        return [slot.table[slot.name] for lane in self._lanes for slot in lane.slots]

    def _share_buffers(self) -> None:
        """Have the buffers of rank 0's copy among our own, and load them into the other ranks, too."""
        for name, module in self._lanes[0].net.named_modules():
            if module._buffers:
                owner = self._named(name)
                owner._buffers = module._buffers
                owner._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.register_load_state_dict_post_hook(_load_buffers)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _load(self, files: Weights) -> None:
        """Read each tensor of the files: each part its slice."""
        ranks = len(self.device_ids)
        kept = self._by_name
        buffers = [dict(lane.net.named_buffers(remove_duplicate=False)) for lane in self._lanes]
        for name, file, key in files.tensors():
            if name not in kept:
                for of_rank in buffers:
                    copy_into(of_rank[name], file.get_tensor(key))
                continue
            cut = kept[name].cut
            for rank, part in enumerate(kept[name].parts):
                copy_into(part, file.get_tensor(key) if cut is None else cut.part(file.get_slice(key), rank, ranks))

    def train(self, mode: bool = True) -> TensorParallel:
        """Set the mode of all ranks."""
        super().train(mode)
        for lane in self._lanes:
            lane.net.train(mode)
        return self

    def each(self, change: Callable[[Module], Any]) -> list[Any]:
        """Call a function with each rank's copy of the module, one after the other, and return its results.

        For changes that must reach all ranks: ``tp.each(lambda net: net.gradient_checkpointing_enable())``.

        Raises:
            RuntimeError: it has added or taken away Parameters: change the module before it is cut.
        """
        for lane in self._lanes:
            for table, name, number in lane.slots:
                table[name] = self._uncut[number]  # a Parameter again, until the next call
        results = [change(lane.net) for lane in self._lanes]
        for lane in self._lanes:
            if dict(lane.net.named_parameters(remove_duplicate=False)).keys() != self._by_name.keys():
                raise RuntimeError("Parameters were added or taken away: change the module before it is cut")
        self.training = self._lanes[0].net.training
        return results

    @outside_the_compiler
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module in all ranks, and return rank 0's output, on the first device.

        A cache that comes back stands for those of all ranks: pass it in again.

        Raises:
            Error: ranks that come to different layers; two threads of which one waits too long for the other.
            Exception: a rank raised it, as in :func:`mgpu_core.parallel_apply`.
        """
        return self._run("__call__", inputs, [kwargs] * len(self._lanes))

    @outside_the_compiler
    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Run a method of the module in all ranks, and return rank 0's result: ``tp.call("generate", ids)``.

        Rank 0 draws random numbers for all ranks where torch's functions draw them.  In ``generate`` of transformers
        streamers, stopping criteria and logits processors are called on rank 0 alone.
        """
        net, ranks = self._lanes[0].net, len(self._lanes)
        getattr(net, method)
        if is_generate(net, method) and ranks > 1:
            return self._run(method, (), arguments_of_ranks(net, unwrapped(inputs), unwrapped(kwargs), ranks))
        return self._run(method, inputs, [kwargs] * ranks)

    def _run(self, method: str, inputs: Any, kwargs: Sequence[Any]) -> Any:
        check_modes()
        if self._refusal is not None:
            raise ValueError(self._refusal)
        with self._at_work.enter(), self._objects:
            watch: Any = NULL_CONTEXT if self._proof is None else self._proof.seen([lane.net for lane in self._lanes])
            whole = NULL_CONTEXT if tracer.sink is None else tracer.span("tensor_parallel")
            with whole, self._numbers.of_call(method, self._modes()) as (numbers, drawn), watch as seen:
                arguments = self._on_ranks(inputs, kwargs)
                self._spread()
                calls = [
                    partial(_called, lane.net, method, of_rank, stream, drawn, rank)
                    for rank, (lane, of_rank, stream) in enumerate(zip(self._lanes, arguments, numbers, strict=True))
                ]
                if tracer.sink is not None:
                    pairs = zip(enumerate(self.device_ids), calls, strict=True)
                    calls = [partial(tracer.in_span, "forward", *each, call) for each, call in pairs]
                run = Run(self._team)
                try:
                    results = run.run(calls, draws=None, workers="threads")
                except BaseException as error:  # after Ctrl-C ranks are still at work, with the next call's modules
                    run.stop(time_limit())
                    if seen is not None and seen[0]:
                        error.add_note(
                            f"the last block of cut layers that had begun is {list(seen[0])[-1]}: if the module alone "
                            "takes these arguments, its code counts heads or features that a rank has a part of"
                        )
                    raise
                if tracer.recording is not None:
                    trace_backward(ALL_RANKS, tensors_in(results[0]))
            self._objects.end(results)
            if seen is not None and seen[0]:
                self._prove(seen)
            return results[0]

    @torch.no_grad()
    def _prove(self, seen: Sequence[Mapping[str, Any]]) -> None:
        """Compare each block that a call has run with the same block uncut, in eval mode; ValueError if it differs."""
        proof = self._proof
        assert proof is not None, "calls are watched for it"
        modes = [each.training for lane in self._lanes for each in lane.modules]
        for lane in self._lanes:
            lane.net.eval()
        try:
            with random_numbers_kept(self.device_ids):
                for name in seen[0]:
                    self._refusal = self._refusal or self._difference(proof, name, [each[name] for each in seen])
        finally:
            for module, mode in zip((each for lane in self._lanes for each in lane.modules), modes, strict=True):
                module.training = mode
        if not proof.is_open:
            self._proof = None
        if self._refusal is not None:
            raise ValueError(self._refusal)

    def _difference(self, proof: Proof, name: str, seen: Sequence[Any]) -> str | None:
        """Return how a cut block differs from the uncut one, on random rows."""
        given = [arguments(each) for each in seen]
        if any(each is None for each in given):
            return None
        run, block = Run(self._team), self._uncut_block(name).eval()
        called = partial(_called, block, "__call__")
        calls = [
            partial(_called, _with_own_state(lane.net.get_submodule(name)), "__call__", of_rank)
            for lane, of_rank in zip(self._lanes, given, strict=True)
        ]
        try:
            whole = called(arguments(seen[0]))
            cut = run.run(calls, draws=None, workers="threads")[0]
        except Exception:  # it does not run alone
            run.stop(time_limit())
            proof.tried(name)
            return None
        return proof.judge(name, block, (whole, cut), lambda: called(arguments(seen[0])))

    def _modes(self) -> bytes:
        """Return the modes of all modules; RuntimeError if they are not those of each rank."""
        first, *others = [bytes([each.training for each in lane.modules]) for lane in self._lanes]
        if others.count(first) != len(others):
            raise RuntimeError("modules of one rank were changed alone: use tp.train(), tp.eval() or tp.each(function)")
        return first

    def _spread(self) -> None:
        """Give each rank copies of the Parameters that are not cut; their gradients are summed in rank order."""
        rows = broadcast_buckets(self.device_ids, self._uncut, numbered=False)
        for lane, row in zip(self._lanes, rows, strict=True):
            for table, name, number in lane.slots:
                table[name] = row[number]

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
            return leaf if is_shared else self._objects.of_rank(rank, leaf)

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
        state = self._lanes[0].net.state_dict(keep_vars=True)
        return {name: wholes[name] if name in wholes else _cloned(each) for name, each in state.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of the module alone into the parts, and its buffers into all ranks.

        Raises:
            ValueError: names that are missing or surplus, or tensors of another shape; nothing was copied then.
        """
        kept = self._by_name
        lanes = [lane.net.state_dict(keep_vars=True) for lane in self._lanes]
        wanted = {name: kept[name].shape if name in kept else _shape_of(each) for name, each in lanes[0].items()}
        given = {name: _shape_of(each) for name, each in state.items()}
        if wrong := [name for name in wanted | given if wanted.get(name) != given.get(name)]:
            raise ValueError(f"the state does not fit, by its names or shapes: {', '.join(wrong[:5])}")
        for name, shape in wanted.items():
            if name not in kept:
                for of_rank in lanes if shape is not None else ():  # extra states are those of the module
                    copy_into(of_rank[name], state[name])
                continue
            cut = kept[name].cut
            for rank, part in enumerate(kept[name].parts):
                copy_into(part, state[name] if cut is None else cut.part(state[name], rank, len(self.device_ids)))

    def uncut(self) -> Module:
        """Return the module alone, with copies of all tensors on the first device."""
        first = self.device_ids[0]
        self.each(lambda _: None)  # no copies of a call are left in the modules
        shared = {id(each.parts[0]): leaf_like(each.parts[0], each.whole(first)) for each in self._kept.values()}
        return self._restored("", copy_module(self._lanes[0].net, shared))

    def _uncut_block(self, name: str) -> Module:
        """Return a block alone, with joined copies of cut Parameters; all else is shared, also the copies of a call."""
        first, lane = self.device_ids[0], self._lanes[0]
        block = lane.net.get_submodule(name)
        shared: dict[int, Any] = {id(slot.table[slot.name]): self._uncut[slot.number] for slot in lane.slots}
        inside = set(map(id, block.parameters()))
        for kept in self._kept.values():
            if kept.cut is not None and id(kept.parts[0]) in inside:
                shared[id(kept.parts[0])] = leaf_like(kept.parts[0], kept.whole(first))
        return self._restored(name, copy_module(block, shared))

    def _restored(self, path: str, copied: Module) -> Module:
        """Give the layers of a copy of our module at a path, and the modules around them, the source's attributes."""
        for name, module in self._source.get_submodule(path).named_modules():
            inside = f"{path}.{name}".strip(".")
            changed = (*(CHANGED if inside in self._plan.layers else ()), *self._plan.heads.get(inside, {}))
            if changed:
                layer = copied.get_submodule(name)
                layer.__dict__.pop("forward" if inside in self._plan.layers else "", None)
                layer.__dict__.update({each: value for each, value in vars(module).items() if each in changed})
        return copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Change dtypes; raise RuntimeError, before anything changes, if a part would leave its device."""
        if any(fn(torch.empty(0, device=device)).device != device for device in self.device_ids):
            refuse_moves()
        for lane in self._lanes[1:]:  # rank 0's are ours
            for module in lane.modules:
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else fn(buffer)
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
        return f"TensorParallel({type(self._source).__name__}, {self.extra_repr()})"


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


def _with_own_state(block: Module) -> Module:
    """Return a copy of a rank's block with the same Parameters: nothing that it writes on itself stays."""
    tensors = [each for module in block.modules() for each in module._parameters.values() if each is not None]
    return copy_module(block, {id(each): each for each in tensors})


def _cloned(entry: Any) -> Any:
    """Return a copy of an entry of a state, which may be a module's own extra state."""
    return entry.detach().clone() if isinstance(entry, torch.Tensor) else entry


def _shape_of(entry: Any) -> tuple[int, ...] | None:
    return tuple(entry.shape) if isinstance(entry, torch.Tensor) else None


@torch.no_grad()
def _load_buffers(tp: TensorParallel, _: Any) -> None:
    """Give the other ranks the buffers that rank 0 has."""
    for lane in tp._lanes[1:]:
        for buffer, first in zip(lane.net.buffers(), tp._lanes[0].net.buffers(), strict=True):
            copy_into(buffer, first)


def _refuse_hooks(net: Module) -> None:
    """Raise ValueError for hooks on Parameters, of which the parts would know nothing."""
    for name, parameter in net.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{name} has a hook, which its parts would not have: register it on tp.parameters()")


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on a device, with memory of its own."""
    tensor = tensor.detach()
    if tensor.is_meta:  # it is read from a file
        return torch.empty_like(tensor, device=device)
    if tensor.device == device:
        return tensor.clone(memory_format=torch.contiguous_format)
    return to_device(tensor, device)


class _CutParameter(Parameter):
    """A Parameter of a module that was cut: it has no memory, and no optimizer may step it."""

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        """Raise RuntimeError: the optimizer would do nothing."""
        raise RuntimeError("this Parameter's module was cut by TensorParallel: make the optimizer of tp.parameters()")


def _emptied(net: Module) -> Module:
    """Put the Parameters of a module on meta, and let its forward and its optimizers say so."""
    for whole in list(net.parameters()):
        empty = torch.Tensor._make_subclass(_CutParameter, torch.empty_like(whole, device="meta"), whole.requires_grad)
        empty.__dict__.update(whole.__dict__)
        whole.grad = None
        torch.utils.swap_tensors(whole, empty)
    net.__dict__["forward"] = _refuse_calls
    return net


def _refuse_calls(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("this module was cut by TensorParallel, and has no weights of its own: call the TensorParallel")
