"""Batch normalisation with the statistics of all ranks' rows, inside one process."""

from mgpu_core.parallel.sync_batchnorm.convert import convert_sync_batchnorm
from mgpu_core.parallel.sync_batchnorm.layer import SyncBatchNorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]
