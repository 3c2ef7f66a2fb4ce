"""Collectives over a team: ``mgpu_core.comm.broadcast`` and the others, with the signatures of torch's."""

from mgpu_core.comm.functional import (
    all_gather,
    all_reduce,
    broadcast,
    broadcast_coalesced,
    gather,
    reduce_add,
    reduce_add_coalesced,
    reduce_scatter,
    scatter,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "reduce_scatter",
    "scatter",
]
