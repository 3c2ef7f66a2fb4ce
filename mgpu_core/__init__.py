"""Several GPUs, one Python process: a better ``torch.nn.DataParallel``, and what is under it.

``import mgpu_core as dp`` stands in for ``torch.nn.parallel``: the same names, the same contract, on GPUs, on CPU ranks
and on mixtures of them.
"""

from importlib import import_module as _import_module

try:
    _import_module("mgpu_core._core")
except ImportError as error:
    raise ImportError(
        f"mgpu_core in {__path__[0]} has no compiled core that this Python can load ({error}). In the source folder of "
        "an installed package, start Python from another folder, or install it in place: "
        "pip install --no-build-isolation -e ."
    ) from error

from mgpu_core import comm, explain, kernels, optim
from mgpu_core.advice import advise
from mgpu_core.containers import register_container
from mgpu_core.data_parallel import DataParallel, data_parallel
from mgpu_core.device.team import Team
from mgpu_core.errors import BackendUnavailable, CudaError, Error, NcclError
from mgpu_core.nested import Replicate, Rows
from mgpu_core.parallel import gather, parallel_apply, reduce, replicate, scatter, scatter_kwargs
from mgpu_core.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from mgpu_core.train.step import TrainStep

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CudaError",
    "DataParallel",
    "Error",
    "NcclError",
    "Replicate",
    "Rows",
    "SyncBatchNorm",
    "Team",
    "TrainStep",
    "advise",
    "comm",
    "convert_sync_batchnorm",
    "data_parallel",
    "explain",
    "gather",
    "kernels",
    "optim",
    "parallel_apply",
    "reduce",
    "register_container",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
