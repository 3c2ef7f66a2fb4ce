r"""Where the ranks of a module that is cut by a plan meet: after a layer each brings what it has, and gets what it needs.

::

    rank 0   ─ norm ─ q, k, v: its columns ─ attention of its heads ─ o: its rows ─┐ sum ─ + ─ norm ─ ...
    rank 1   ─ norm ─ q, k, v: its columns ─ attention of its heads ─ o: its rows ─┘ sum ─ + ─ norm ─ ...

The last rank to come makes one autograd node for all of them, so there is one graph and nobody waits in a backward.

A checkpoint runs layers again inside a backward, in autograd's thread, where nobody meets.  So what a layer got is kept
with the checkpoint's own frame, and given again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.nn import Module
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from mgpu_core.devices.streams import on_all
from mgpu_core.errors import Error
from mgpu_core.ranks.context import checkpoint_closure
from mgpu_core.ranks.run import Lane, Run, current_lane
from mgpu_core.tensor_parallel.collectives import all_gather, all_reduce
from mgpu_core.trace.tracer import span

__all__ = ["MetDraws", "cut_layer", "decided", "meet_at"]

Node = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

_KEY = "tensor parallel"  # one for all layers: ranks that come to different ones are told so, and do not wait
_KEPT, _AT = "_mgpu_core_kept", "_mgpu_core_at"  # attributes of a checkpoint's frame


def gathered(outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return to each rank all columns."""
    return all_gather(outputs, -1)


def meet_at(name: str, value: Any, combine: Callable[[Run, list[Any]], Sequence[Any]]) -> Any:
    """Meet the other ranks at a place of this name; return this one's entry of what ``combine`` makes of the values.

    Raises:
        Error: no call is on its way; another rank has come to another place.
    """
    lane = current_lane()
    if lane is None:
        raise Error(f"{name} is cut over ranks, which meet in calls of the TensorParallel alone: use its call() or forward")

    def checked(values: list[tuple[str, Any]]) -> Sequence[Any]:
        other = next((rank for rank, each in enumerate(values) if each[0] != values[0][0]), None)
        if other is not None:
            raise Error(
                f"rank 0 came to {values[0][0]} and rank {other} to {values[other][0]}: every rank must run the same "
                "layers, in the same order"
            )
        return combine(lane.run, [each for _, each in values])

    return lane.meet(_KEY, (name, value), checked)


def _joined(name: str, rank: int, value: torch.Tensor, node: Node) -> torch.Tensor:
    """Return this rank's entry of a node over all ranks' values; in a backward the one of the forward."""
    closure = checkpoint_closure()
    if _current_graph_task_id() != -1:
        return _again(name, closure, value)

    def combine(run: Run, values: list[Any]) -> Sequence[Any]:
        with (
            span("meet", -1, None),
            on_all(run.team.devices, run.streams),
            torch.set_grad_enabled(any(graph for _, graph in values)),
        ):
            return node([each for each, _ in values])

    result: torch.Tensor = meet_at(name, (value, torch.is_grad_enabled()), combine)
    if closure is not None and torch.is_grad_enabled():
        closure["frame"].__dict__.setdefault(_KEPT, []).append((name, result.detach()))
    return result


def _again(name: str, closure: dict[str, Any] | None, value: torch.Tensor) -> torch.Tensor:
    if closure is None or "target_frame_ref" not in closure:
        raise RuntimeError(
            f"{name} ran again in a backward, and its ranks meet in the forward alone: give the checkpoint around it "
            "use_reentrant=False"
        )
    frame = closure["target_frame_ref"]()
    position = frame.__dict__.setdefault(_AT, {})
    index = position.get(closure["gid"], 0)
    position[closure["gid"]] = index + 1
    was, kept = frame.__dict__[_KEPT][index]
    if was != name:
        raise RuntimeError(f"{name} ran again in a backward where {was} ran in the forward: layers must run as before")
    result: torch.Tensor = kept.detach().requires_grad_(value.requires_grad)
    return result


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
    inner = layer.forward
    if word in ("column", "packed_column", "column_gathered"):
        layer.out_features = layer.weight.shape[0]  # type: ignore[assignment,union-attr,index]
    if word == "column_gathered":

        def column(x: torch.Tensor) -> torch.Tensor:
            return _joined(name, rank, inner(x), gathered)

        layer.forward = column
    elif word in ("row", "rowwise_split_input"):
        layer.in_features = end - begin  # type: ignore[assignment]

        def row(x: torch.Tensor) -> torch.Tensor:
            table = layer._parameters
            bias, table["bias"] = table["bias"], None  # it is added once
            try:
                part = inner(x if word == "row" else x[..., begin:end])
            finally:
                table["bias"] = bias
            total = _joined(name, rank, part, all_reduce)
            return total if bias is None else total + bias.to(total.dtype)

        layer.forward = row
    elif word == "vocab":
        layer.num_embeddings = end - begin  # type: ignore[assignment]
        padding = layer.padding_idx
        inside = isinstance(padding, int) and begin <= padding < end
        layer.padding_idx = padding - begin if inside else None  # type: ignore[assignment,operator]

        def vocab(tokens: torch.Tensor) -> torch.Tensor:
            own = tokens - begin
            elsewhere = (own < 0) | (own >= end - begin)
            if rank == 0:  # so that torch refuses what no rank has
                elsewhere &= tokens >= 0
            if rank == len(counts) - 1:
                elsewhere &= own < end - begin
            rows = inner(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
            return _joined(name, rank, rows, all_reduce)

        layer.forward = vocab
    elif word == "moe_tp_experts":

        def experts(*args: Any, **kwargs: Any) -> torch.Tensor:
            return _joined(name, rank, inner(*args, **kwargs), all_reduce)

        layer.forward = experts


def _of_first(run: Run, values: list[Any]) -> list[Any]:
    """Return rank 0's tensor to every rank, on its device."""
    first = values[0]
    with on_all(run.team.devices, run.streams):
        return [first.to(device, copy=rank > 0) for rank, device in enumerate(run.team.devices)]


def decided(lane: Lane, name: str, decide: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor that rank 0 alone makes, on this rank's device."""
    result: torch.Tensor = meet_at(name, decide() if lane.rank == 0 else None, _of_first)
    return result


class MetDraws(TorchFunctionMode):
    """Let rank 0 draw random numbers for all ranks, in calls of torch's functions by name."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane

    def __enter__(self) -> MetDraws:
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _DRAWS:
            return func(*args, **kwargs)
        made = decided(self._lane, name, lambda: func(*args, **kwargs))
        if name.endswith("_") and self._lane.rank:
            return args[0].copy_(made)
        return made


_DRAWS = frozenset(
    f"{name}{end}"
    for name in (
        *("multinomial", "bernoulli", "rand", "randn", "randint", "randperm", "normal", "poisson", "rand_like"),
        *("randn_like", "randint_like", "uniform", "exponential", "geometric", "cauchy", "log_normal", "random"),
    )
    for end in ("", "_")
)
"""Names of the functions and methods that draw."""
