"""Scatter: a nested object becomes one per rank, its tensors cut along ``dim``.

All tensors are cut at the same rows, whatever their shapes, so they must agree on how many there are.  A leaf that
cannot be cut goes to every rank: scalars and :class:`~mgpu_core.trees.nested.Replicate` as copies, everything else by
reference.
"""

from mgpu_core.parallel.scatter_inputs.api import scatter, scatter_kwargs
from mgpu_core.parallel.scatter_inputs.arguments import split_ahead
from mgpu_core.parallel.scatter_inputs.chunks import check_shares
from mgpu_core.parallel.scatter_inputs.fast_path import scatter_objects

__all__ = ["check_shares", "scatter", "scatter_kwargs", "scatter_objects", "split_ahead"]
