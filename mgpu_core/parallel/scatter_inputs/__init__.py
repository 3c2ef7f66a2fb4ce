"""Scatter: a nested object becomes one per rank, its tensors cut along ``dim``.

All tensors are cut at the same rows, whatever their shapes, so they must agree on how many there are.  A leaf that
cannot be cut goes to every rank: scalars and :class:`~mgpu_core.trees.nested.Replicate` as copies, everything else by
reference.
"""

from mgpu_core.parallel.scatter_inputs.cut import (
    check_shares,
    row_counts,
    scatter,
    scatter_kwargs,
    scatter_objects,
    split_ahead,
)

__all__ = ["check_shares", "row_counts", "scatter", "scatter_kwargs", "scatter_objects", "split_ahead"]
