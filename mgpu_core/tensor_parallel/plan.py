"""Plans: which layers and Parameters of a module are cut over ranks, and how.

A plan is a dict from names to words.  A ``*`` in a name stands for one part between dots.  The words are ours, or those
of transformers, whose models bring plans of their own (``tp_plan``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Module

from mgpu_core.parallel.scatter_inputs import row_counts
from mgpu_core.tensor_parallel.families import HEAD_COUNTS, family_plan, heads_of, is_transposed

__all__ = ["ShardPlan", "WeightCut", "read_plan", "suggested_plan"]

_WORDS = {
    "column": "column",
    "row": "row",
    "column_gathered": "column_gathered",
    "vocab": "vocab",
    "packed_column": "packed_column",
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gathered",
    "embedding_rowwise": "vocab",
    "packed_colwise": "packed_column",
    "rowwise_split_input": "rowwise_split_input",
    "moe_tp_experts": "moe_tp_experts",
    "replicated_with_grad_allreduce": "replicate",
    "replicate": "replicate",
}
"""Words of plans, and their meanings."""

_OF_LINEAR = {"column": 0, "column_gathered": 0, "packed_column": 0, "row": 1, "rowwise_split_input": 1}
"""The dimension of the weight of a linear layer that is cut."""

_OF_PARAMETERS = {"column": -2, "packed_column": -2, "row": -1}
_PACKED = 2  # gate and up lie one behind the other, and each is cut
_WRAPPERS = re.compile(r"^(?:base_model\.model\.|module\.|_orig_mod\.)+|\.(?:base_layer|_orig_mod)(?=\.|$)")
"""What PEFT, torch's wrappers and its compiler add to the names of a module."""

_SHOWN = 5


class WeightCut(NamedTuple):
    """How a tensor is cut: along a dimension, in each of some equal pieces.

    Attributes:
        dim: the dimension, not negative.
        pieces: how many pieces lie one behind the other along it.
    """

    dim: int
    pieces: int = 1

    def part(self, whole: Any, rank: int, ranks: int) -> torch.Tensor:
        """Return a rank's part of a tensor, or of a slice of safetensors, of which nothing else is read."""
        shape = whole.shape if isinstance(whole, torch.Tensor) else whole.get_shape()
        size = shape[self.dim] // self.pieces
        counts = row_counts(size, ranks, None)
        begins = [piece * size + sum(counts[:rank]) for piece in range(self.pieces)]
        before = [slice(None)] * self.dim
        parts = [whole[(*before, slice(begin, begin + counts[rank]))] for begin in begins]
        return parts[0] if self.pieces == 1 else torch.cat(parts, self.dim)

    def joined(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor of all ranks' parts, which are on one device."""
        pieces = zip(*(each.chunk(self.pieces, self.dim) for each in parts), strict=True)
        return torch.cat([each for piece in pieces for each in piece], self.dim)


class ShardPlan(NamedTuple):
    """A plan, understood for one module.

    Attributes:
        layers: by the names of modules whose inputs or outputs change, the word: ``column_gathered``, ``row``,
            ``rowwise_split_input``, ``vocab`` or ``moe_tp_experts``; and ``column`` and ``packed_column``, after which
            each rank has a part.
        cuts: by the first names of Parameters.
        heads: by the names of modules around columns, their attributes that count heads.
    """

    layers: dict[str, str]
    cuts: dict[str, WeightCut]
    heads: dict[str, dict[str, int]]


def read_plan(net: Module, given: Mapping[str, str] | None, ranks: int) -> ShardPlan:
    """Return a plan for a module, or the module's own plan.

    Args:
        net: the module.
        given: from names of modules or Parameters to words; ``None``: the attribute ``tp_plan`` of the module, or else
            that of its family.
        ranks: how many there are.

    Raises:
        ValueError: no plan; a word that is not understood; a name that matches nothing; a layer that cannot be cut in
            that way, or has fewer features or heads than ranks.
    """
    plan = (_own_plan(net) or family_plan(net, ranks)) if given is None else given
    if given is None and not plan:
        raise ValueError(f"{type(net).__name__} has no plan of its own{_example(net, ranks)}")
    reader = _Reader(net, ranks)
    nothing = [pattern for pattern, word in plan.items() if not reader.take(pattern, word)]
    if nothing and given is not None:
        raise ValueError(f"the plan has names that match nothing in {type(net).__name__}: {_listed(nothing)}")
    reader.take_ties()
    reader.check()
    return ShardPlan(reader.layers, reader.cuts, reader.heads() if ranks > 1 else {})


class _Reader:
    """What of a plan has been understood so far."""

    def __init__(self, net: Module, ranks: int) -> None:
        self._ranks = ranks
        self._modules = dict(net.named_modules(remove_duplicate=False))
        self._parameters = dict(net.named_parameters(remove_duplicate=False))
        names = [*self._modules, *self._parameters]
        self._plain = {_WRAPPERS.sub("", name): name for name in names}  # of a layer of PEFT the layer inside
        self._first: dict[int, str] = {}  # of a Parameter or a module with several names the first
        for name, target in (*self._parameters.items(), *self._modules.items()):
            self._first.setdefault(id(target), name)
        self._by_name: set[str] = set()  # Parameters that the plan names themselves
        self.layers: dict[str, str] = {}
        self.cuts: dict[str, WeightCut] = {}

    def take(self, pattern: str, word: str) -> bool:
        """Take an entry of the plan; return whether its name matches something."""
        wanted = re.compile("[^.]*".join(map(re.escape, _WRAPPERS.sub("", pattern).split("*"))))
        names = [name for plain, name in self._plain.items() if wanted.fullmatch(plain)]
        if names and word not in _WORDS:
            raise ValueError(f"the plan has {word!r} for {pattern!r}, which is not understood: {', '.join(_WORDS)} are")
        for name in names:
            if name in self._modules:
                self._take_layer(name, _WORDS[word])
            else:
                self._take_parameter(name, _WORDS[word])
        return bool(names)

    def _take_parameter(self, name: str, word: str) -> None:
        if word == "replicate":
            return
        tensor = self._parameters[name]
        if word not in _OF_PARAMETERS or tensor.ndim < 2:
            raise ValueError(f"{name} is a Parameter of shape {tuple(tensor.shape)}, which cannot be cut by {word!r}")
        self._by_name.add(name)
        self._cut(name, tensor.ndim + _OF_PARAMETERS[word], _PACKED if word == "packed_column" else 1)

    def _take_layer(self, name: str, word: str) -> None:
        layer = self._modules[name]
        name = self._first[id(layer)]
        if word == "replicate" or self.layers.get(name) == word:
            return
        if name in self.layers:
            raise ValueError(f"the plan says {self.layers[name]!r} and {word!r} of {name}")
        if word == "moe_tp_experts":
            self.layers[name] = word
            return
        kind = nn.Embedding if word == "vocab" else nn.Linear
        weight = getattr(layer, "weight", None)
        transposed = kind is nn.Linear and is_transposed(layer)
        if (
            not (transposed or isinstance(layer, kind))
            or not isinstance(weight, torch.Tensor)
            or not weight.is_floating_point()
        ):
            raise ValueError(f"{name} is a {type(layer).__name__}, and {word!r} is for an nn.{kind.__name__}")
        is_known = transposed or type(layer).forward is nn.Linear.forward
        if word in ("row", "rowwise_split_input") and not is_known:
            raise ValueError(
                f"{name} is a {type(layer).__name__}, of whose own forward {word!r} parts cannot be summed"
            )
        for option in ("max_norm", "scale_grad_by_freq", "sparse") if word == "vocab" else ():
            if getattr(layer, option) not in (None, False):
                raise ValueError(f"{name} is an embedding with {option}, which cannot be cut over ranks")
        self.layers[name] = word
        dim = 0 if word == "vocab" else _OF_LINEAR[word]
        self._cut(f"{name}.weight", 1 - dim if transposed else dim, _PACKED if "packed" in word else 1)
        if getattr(layer, "bias", None) is not None and _OF_LINEAR.get(word) == 0:
            self._cut(f"{name}.bias", 0, _PACKED if "packed" in word else 1)
        self._take_adapter(name, word)

    def _take_adapter(self, name: str, word: str) -> None:
        """Cut the layers of LoRA around a planned layer with it."""
        outer, _, last = name.rpartition(".")
        around = self._modules.get(outer)
        if last != "base_layer" or not isinstance(around, Module):
            return
        if word == "vocab" or around._parameters or len(getattr(around, "lora_magnitude_vector", ())):
            raise ValueError(f"{outer} is a {type(around).__name__} of a kind that cannot be cut with its layer")
        side = "lora_A" if word in ("row", "rowwise_split_input") else "lora_B"
        for adapter in getattr(around, side, {}):
            self._take_layer(f"{outer}.{side}.{adapter}", word)

    def _cut(self, name: str, dim: int, pieces: int) -> None:
        if name not in self._parameters:
            raise ValueError(f"{name} is computed, by a parametrization or pruning: make it a Parameter before the cut")
        tensor, cut = self._parameters[name], WeightCut(dim, pieces)
        if tensor.shape[dim] % pieces or tensor.shape[dim] // pieces < self._ranks:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} cannot be cut along dimension {dim} for {self._ranks} ranks"
            )
        first = self._first[id(tensor)]
        if self.cuts.setdefault(first, cut) != cut:
            raise ValueError(f"the plan cuts {first} in two ways: it is {name}, too")

    def take_ties(self) -> None:
        """Cut the other layers of a Parameter that is cut: the plan may name only one of them."""
        for name, tensor in self._parameters.items():
            owner, _, last = name.rpartition(".")
            cut = self.cuts.get(self._first[id(tensor)])
            if cut is None or last != "weight" or name in self._by_name:
                continue
            layer = self._modules[owner]
            if self._first[id(layer)] in self.layers:
                continue
            if cut != WeightCut(0) or not isinstance(layer, nn.Embedding | nn.Linear):
                raise ValueError(
                    f"{name} is cut under another name, and a {type(layer).__name__} cannot compute with it"
                )
            self._take_layer(owner, "vocab" if isinstance(layer, nn.Embedding) else "column_gathered")

    def check(self) -> None:
        """Raise ValueError if heads of attention cannot be divided among the ranks."""
        for name, word in self.layers.items():
            if word != "column":
                continue
            heads = heads_of(self._modules[name], self._around(name))
            if heads is not None and heads % self._ranks:
                raise ValueError(
                    f"{name} has {heads} heads, which cannot be divided among {self._ranks} ranks: use as many ranks "
                    "as divide them, or column_gathered"
                )

    def heads(self) -> dict[str, dict[str, int]]:
        """Return the numbers of heads of modules around columns, where the ranks can have equal parts of them."""
        heads: dict[str, dict[str, int]] = {}
        for name, word in self.layers.items():
            if word == "column":
                around = self._around(name)
                counts = {each: vars(around).get(each) for each in HEAD_COUNTS}
                whole = {each: n for each, n in counts.items() if type(n) is int and n and n % self._ranks == 0}
                if whole:
                    heads[self._first[id(around)]] = whole
        return heads

    def _around(self, name: str) -> Module:
        """Return the module around a layer, or around the layer of PEFT that it is in."""
        parts = name.split(".")
        if "base_layer" in parts:
            parts = parts[: parts.index("base_layer")]
        elif "lora_B" in parts:
            parts = parts[: parts.index("lora_B")]
        around: Module = self._modules[".".join(parts[:-1])]
        return around


def _own_plan(module: Module) -> Mapping[str, str]:
    """Return the plan that a module brings; empty where it brings none."""
    plan = getattr(module, "tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def suggested_plan(net: Module, ranks: int = 2) -> dict[str, str]:
    """Return a plan for the linear layers of a module, which is right for each.

    A column and a row are two layers of a Sequential with activations between them, or the two or three of a module
    that widens and narrows again and has nothing else with Parameters.  All others are gathered, such as those of
    attention, whose code may count heads.
    """
    plan: dict[str, str] = {}
    for path, around in net.named_modules():
        linears = {name: each for name, each in around.named_children() if type(each) is nn.Linear}
        linears = {name: each for name, each in linears.items() if each.out_features >= ranks}
        names = {name: each for name, each in linears.items() if not _reads_weight(around, name)}
        for name in names:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", f"{path}.{name}".strip("."))
            word = _words_of(around, names).get(name, "column_gathered")
            if plan.setdefault(pattern, word) != word:
                plan[pattern] = "column_gathered"
    return plan


def _reads_weight(around: Module, name: str) -> bool:
    """Return whether the forward of a module reads the weight of a layer itself, which may be a part."""
    try:
        return f".{name}.weight" in inspect.getsource(type(around).forward)
    except (OSError, TypeError):  # there is no source
        return False


def _words_of(around: Module, layers: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Return which linear layers of a module are pairs of a column and a row."""
    words: dict[str, str] = {}
    if isinstance(around, nn.Sequential):
        waiting = ""
        for name, layer in around.named_children():
            if waiting and name in layers and layers[name].in_features == layers[waiting].out_features:
                words |= {waiting: "column", name: "row"}
                waiting = ""
            elif not waiting or not _keeps_features_apart(layer):
                waiting = name if name in layers else ""
        return words
    others = [each for name, each in around.named_children() if name not in layers]
    *first, last = layers.values() if layers else [None]
    alike = {(each.in_features, each.out_features) for each in first if each is not None}
    if len(first) in (1, 2) and last is not None and alike == {(last.out_features, last.in_features)}:
        is_wider = last.in_features > last.out_features
        if is_wider and not around._parameters and all(map(_keeps_features_apart, others)):
            *columns, row = layers
            words = dict.fromkeys(columns, "column") | {row: "row"}
    return words


def _keeps_features_apart(layer: Module) -> bool:
    """Return whether a layer is an activation or dropout, by its name and for want of tensors and layers."""
    is_empty = not any(True for _ in layer.children()) and not layer._parameters and not layer._buffers
    return is_empty and re.search("norm|soft(max|min)|pool|flatten|glu", type(layer).__name__, re.IGNORECASE) is None


def _example(net: Module, ranks: int) -> str:
    """Return the advice for a module without a plan."""
    for name, child in net.named_children():
        if _own_plan(child):
            return f": that of its {name} cuts {name} alone: {type(net).__name__}(TensorParallel(...))"
    plan = dict(list(suggested_plan(net, ranks).items())[:_SHOWN])
    return f": pass plan=, such as {plan}" if plan else ", and no linear layers to cut: use Pipeline or place()"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
