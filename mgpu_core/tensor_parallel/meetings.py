r"""Where the ranks of a module that is cut by a plan meet: after a layer each brings its value, and gets a joint one.

::

    rank 0   ─ norm ─ q, k, v: its columns ─ attention of its heads ─ o: its rows ─┐ sum ─ + ─ norm ─ ...
    rank 1   ─ norm ─ q, k, v: its columns ─ attention of its heads ─ o: its rows ─┘ sum ─ + ─ norm ─ ...

The last rank to come makes one autograd node for all of them, so there is one graph and nobody waits in a backward.

A checkpoint runs layers again inside a backward, in autograd's thread, where nobody meets.  So the result of a layer is
kept with the checkpoint's own frame, and given again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch._C import _current_graph_task_id
from torch.nn import Module

from mgpu_core.comm.collectives import joint_columns, joint_sum
from mgpu_core.devices.streams import on_all
from mgpu_core.devices.transfer import to_device
from mgpu_core.errors import Error
from mgpu_core.ranks.context import checkpoint_closure
from mgpu_core.ranks.run import Run, current_lane
from mgpu_core.tensor_parallel.families import is_transposed
from mgpu_core.trace import tracer
from mgpu_core.trace.events import ALL_RANKS
from mgpu_core.trace.tracer import mark, span
from mgpu_core.trees.nested import map_leaves

__all__ = ["CHANGED", "cut_layer", "decided", "no_lane"]

Node = Callable[[torch.Tensor | None, Sequence[torch.Tensor]], Sequence[Any]]
"""Takes the token that the joint before has left and the ranks' values; returns a token and the ranks' results."""

_KEY = "tensor parallel"  # one for all layers: ranks that come to different ones are told so, and do not wait
_KEPT, _AT = "_mgpu_core_kept", "_mgpu_core_at"  # attributes of a checkpoint's frame
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


_Came: TypeAlias = tuple[str, Any, bool, Run]
"""Brought by a rank to a meeting: the name of the layer, a value, whether it is in grad mode, and its call."""


def _together(combine: Callable[[Run, list[Any]], Sequence[Any]], came: list[_Came]) -> Sequence[Any]:
    """Return a function of all ranks' values, on the streams of their call.

    Raises:
        Error: the ranks came to different places.
    """
    values: list[Any] = []
    place, has_graph = came[0][0], False
    for there, value, graph, _ in came:
        if there != place:
            raise Error(
                f"rank 0 came to {place} and rank {len(values)} to {there}: every rank must run the same layers, in "
                "the same order"
            )
        values += (value,)
        has_graph |= graph
    run = came[0][3]
    if run.team.on_host and tracer.sink is None and has_graph == torch.is_grad_enabled():
        return combine(run, values)
    with span("meet"), on_all(run.team.devices, run.streams), torch.set_grad_enabled(has_graph):
        if tracer.recording is not None:
            mark("meet", ALL_RANKS, text=place)
        return combine(run, values)


def no_lane(place: str) -> NoReturn:
    """Raise Error: outside of a call there is no rank."""
    raise Error(
        f"{place} is cut over ranks, which meet in calls of the TensorParallel alone: use its forward or call()"
    )


class Joint:
    """The meeting after one layer, as a rank has it.

    Args:
        name: of the layer.
        node: makes all ranks' results of their values.
    """

    def __init__(self, name: str, node: Node) -> None:
        self._name, self._node = name, node
        self._together = partial(_together, self._combine)

    def _combine(self, run: Run, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        run.token, *results = self._node(run.token, values)
        return results

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's result; in a backward, which runs the layer again, the one of the forward."""
        closure = None if _top_hooks(False) is None else checkpoint_closure()
        if _current_graph_task_id() != -1:
            return self._again(closure, value)
        lane = current_lane() or no_lane(self._name)
        came = self._name, value, torch.is_grad_enabled(), lane.run
        result: torch.Tensor = lane.meet(_KEY, came, self._together)
        if closure is not None and came[2]:
            closure["frame"].__dict__.setdefault(_KEPT, []).append((self._name, result.detach()))
        return result

    def _again(self, closure: dict[str, Any] | None, value: torch.Tensor) -> torch.Tensor:
        if closure is None or "target_frame_ref" not in closure:
            raise RuntimeError(
                f"{self._name} ran again in a backward, and its ranks meet in the forward alone: give the checkpoint "
                "around it use_reentrant=False"
            )
        frame = closure["target_frame_ref"]()
        position = frame.__dict__.setdefault(_AT, {})
        index = position.get(closure["gid"], 0)
        position[closure["gid"]] = index + 1
        name, kept = frame.__dict__[_KEPT][index]
        if name != self._name:
            raise RuntimeError(
                f"{self._name} ran again in a backward where {name} ran in the forward: layers must run as before"
            )
        result: torch.Tensor = kept.detach().requires_grad_(value.requires_grad)
        return result


CHANGED = ("forward", "out_features", "in_features", "nf", "num_embeddings", "padding_idx")
"""The attributes of a layer that are others in a rank's copy."""


def _own_forward(layer: Module) -> Callable[..., torch.Tensor]:
    """Return a layer's forward without a reference to the layer, which will refer to it."""
    if "forward" in layer.__dict__:
        forward: Callable[..., torch.Tensor] = layer.__dict__["forward"]
        return forward
    layer_ref, function = weakref.ref(layer), type(layer).forward
    return lambda *args, **kwargs: function(layer_ref(), *args, **kwargs)


def _of_other_ranks(tokens: torch.Tensor, counts: Sequence[int], rank: int) -> torch.Tensor:
    """Return which tokens are in the parts of a vocabulary that other ranks have.

    Tokens outside the vocabulary belong to the first and the last rank, where torch refuses them.
    """
    begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
    elsewhere = torch.zeros_like(tokens, dtype=torch.bool)
    if rank > 0:
        elsewhere |= tokens < begin
    if rank < len(counts) - 1:
        elsewhere |= tokens >= end
    return elsewhere


def cut_layer(layer: Module, name: str, word: str, rank: int, counts: Sequence[int]) -> None:
    """Let a layer that has a rank's part of its parameters meet the other ranks around its own forward.

    Args:
        layer: of the rank, with its part.
        name: of the layer.
        word: of the plan.
        rank: its rank.
        counts: the sizes of all ranks' parts.
    """
    begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
    inner, transposed = _own_forward(layer), is_transposed(layer)
    table: dict[str, Any] = layer._parameters
    joint = Joint(name, joint_columns if word == "column_gathered" else joint_sum)

    def joined(*args: Any, **kwargs: Any) -> torch.Tensor:
        return joint(inner(*args, **kwargs))

    def of_rows(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002 (torch's name)
        bias, table["bias"] = table["bias"], None  # it is added once
        if bias is not None and transposed:  # which takes none
            table["bias"] = torch.zeros_like(bias)
        try:
            total = joined(input if word == "row" else input[..., begin:end], *args, **kwargs)
        finally:
            table["bias"] = bias
        return total if bias is None else total + bias.to(total.dtype)

    def of_tokens(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002
        elsewhere = _of_other_ranks(input, counts, rank)
        rows = inner((input - begin).masked_fill(elsewhere, 0), *args, **kwargs)
        return joint(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    attributes: dict[str, Any] = {}
    if word in ("column", "packed_column", "column_gathered"):
        weight = layer.get_parameter("weight")
        attributes = {"nf": weight.shape[1]} if transposed else {"out_features": weight.shape[0]}
    elif word in ("row", "rowwise_split_input"):
        attributes = {"in_features": end - begin, "forward": of_rows}
    elif word == "vocab":
        padding: Any = layer.padding_idx
        padding_idx = padding - begin if padding is not None and begin <= padding < end else None
        attributes = {"num_embeddings": end - begin, "padding_idx": padding_idx, "forward": of_tokens}
    if word in ("column_gathered", "moe_tp_experts"):
        attributes["forward"] = joined
    for attribute, value in attributes.items():
        setattr(layer, attribute, value)


def decided(place: str, decide: Callable[[], Any]) -> Any:
    """Return a nest that rank 0 alone makes; tensors on this rank's device."""
    lane = current_lane() or no_lane(place)
    devices = lane.run.team.devices

    def of_first(_: Run, values: list[Any]) -> list[Any]:
        def on(rank: int, leaf: Any) -> Any:
            return to_device(leaf, devices[rank], copy=rank > 0) if isinstance(leaf, torch.Tensor) else leaf

        return [map_leaves(values[0], partial(on, rank)) for rank in range(len(values))]

    came = place, None if lane.rank else decide(), torch.is_grad_enabled(), lane.run
    return lane.meet(_KEY, came, partial(_together, of_first))
