"""The kernels as functions of tensors; each has a plain-torch truth in :mod:`mgpu_core.kernels.reference`."""

from mgpu_core.kernels.flat_optimizers import adam, adam_groups, adamw, segment_table, sgd, sgd_groups
from mgpu_core.kernels.ops import gather_rows, l2_norm, pack, scale_cast, sum_ranks, unpack

__all__ = [
    "adam",
    "adam_groups",
    "adamw",
    "gather_rows",
    "l2_norm",
    "pack",
    "scale_cast",
    "segment_table",
    "sgd",
    "sgd_groups",
    "sum_ranks",
    "unpack",
]
