"""The kernels as functions of tensors; each has a plain-torch truth in :mod:`mgpu_core.kernels.reference`."""

from mgpu_core.kernels.ops import gather_rows

__all__ = ["gather_rows"]
