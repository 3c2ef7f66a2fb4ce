"""The kernels as functions of tensors; each has a plain-torch truth in :mod:`mgpu_core.kernels.reference`."""

from mgpu_core.kernels.flat_norm import FlatNorm, l2_norm
from mgpu_core.kernels.flat_optimizers import FlatKernel, adam, adamw, lion, sgd
from mgpu_core.kernels.flat_tables import adam_groups, lion_groups, segment_table, sgd_groups
from mgpu_core.kernels.ops import gather_rows, pack, scale_cast, sum_ranks, unpack

__all__ = [
    "FlatKernel",
    "FlatNorm",
    "adam",
    "adam_groups",
    "adamw",
    "gather_rows",
    "l2_norm",
    "lion",
    "lion_groups",
    "pack",
    "scale_cast",
    "segment_table",
    "sgd",
    "sgd_groups",
    "sum_ranks",
    "unpack",
]
