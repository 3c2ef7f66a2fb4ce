"""``register_batches``: batches of PyTorch Geometric are cut by graphs, and their nodes and edges follow."""

from __future__ import annotations

from typing import Any

import torch

from mgpu_core.devices.transfer import to_device
from mgpu_core.support.extras import require
from mgpu_core.trees.containers import register_container
from mgpu_core.trees.nested import Rows

__all__ = ["register_batches"]

_data = require("torch_geometric.data", "register_batches")


def register_batches(*kinds: type) -> None:
    """Let ``DataParallel(net)(batch)`` and a step cut a ``Batch`` by graphs: each rank gets some, as a ``Batch``.

    Graphs count as rows: a tensor next to the batch has one row per graph, and so have outputs that are joined again.
    A rank's batch is put together anew from its graphs, with the ``follow_batch`` of the loader.  An attribute that was
    set on the batch belongs to no graph, and is refused by name when the batch is cut.

    Args:
        kinds: classes of graphs, such as ``HeteroData`` or a subclass of ``Data``; none: ``Data``.

    Raises:
        TypeError: a class that is not one of graphs.
    """
    for kind in kinds or (_data.Data,):
        if not (isinstance(kind, type) and issubclass(kind, _data.data.BaseData)):
            raise TypeError(f"{kind!r} is not a class of graphs: Data, HeteroData or a subclass")
        register_container(type(_data.Batch(_base_cls=kind)), _graphs, _batch)


def _graphs(batch: Any) -> tuple[list[Any], list[str]]:
    """Return the graphs as rows, and a tensor with a number for each, which tells the rank's device.

    Beside them the names that the loader's ``follow_batch`` had.

    Raises:
        TypeError: an attribute that belongs to the batch and to no graph.
    """
    graphs = batch.to_data_list()
    known = {"batch", "ptr"}.union(*(each.keys() for each in graphs))
    others = [name for name in batch.keys() if name not in known]  # noqa: SIM118 (no mapping)
    followed = [name for name in known if {f"{name}_batch", f"{name}_ptr"} <= set(others)]
    of_batch = set(others).difference(*({f"{name}_batch", f"{name}_ptr"} for name in followed))
    if of_batch:
        raise TypeError(
            f"batch.{min(of_batch)} belongs to the batch and to no graph, so it cannot be cut by graphs: set it on "
            "each Data before they are batched, or pass it as an argument of its own"
        )
    return [Rows(graphs), torch.zeros(len(graphs))], followed


def _batch(values: list[Any], followed: list[str]) -> Any:
    graphs, numbers = values
    return _data.Batch.from_data_list(graphs, follow_batch=followed).apply(
        lambda tensor: to_device(tensor, numbers.device)
    )
