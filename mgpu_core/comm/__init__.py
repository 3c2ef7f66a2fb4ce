"""Collectives over a team: ``mgpu_core.comm.broadcast`` and the others, with the signatures of torch's.

None of them is differentiable (:mod:`mgpu_core.comm.autograd` is).  A device may be the CPU, and may come more than
once: one entry of a list is one rank.  Tensors on an accelerator are read and written on the current streams.
"""

from mgpu_core.comm.all_ranks import all_gather, all_reduce, reduce_scatter
from mgpu_core.comm.api import broadcast, broadcast_coalesced, gather, reduce_add, reduce_add_coalesced, scatter

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
