"""Scatter: a nested object becomes one per rank, its tensors cut along ``dim``.

All tensors are cut at the same rows, whatever their shapes, so they must agree on how many there are.  What cannot be
cut goes to every rank: scalars and :class:`~mgpu_core.nested.Replicate` as copies, everything else by reference.
"""

from mgpu_core.parallel.scatter.forms import scatter, scatter_kwargs
from mgpu_core.parallel.scatter.objects import scatter_objects
from mgpu_core.parallel.scatter.rows import check_shares

__all__ = ["check_shares", "scatter", "scatter_kwargs", "scatter_objects"]
