"""Several GPUs in one Python process: a better ``torch.nn.DataParallel``, on CPU ranks too.

DataParallel    the drop-in: torch's signatures, gradients in your module
TrainStep       a whole step in one call: split, forward, loss, backward, all-reduce, update
Pipeline        a model cut over devices, with micro-batches in flight
place           the layers of a model over devices, without micro-batches
TensorParallel  every layer cut over devices
Predictor       answers to requests from any thread, in batches, over devices
DeviceLoader    batches of any loader, cut and copied to the devices one ahead
optim           SGD, Adam, AdamW and Lion, updated by one kernel
explain         records each step, and shows its traffic and times as a table or a page
advise          measures whether several devices pay for your model, and which way

help(mgpu_core.TrainStep) says more on each; dir(mgpu_core) has the other names, such as scatter, gather and comm.
The guides are in docs/ of the repository: run.md, migration.md, train_step.md; its index.md leads to the rest.
The command line: mgpu --help.
"""

# Names are imported at their first use, so that the command line starts without torch.

import sys as _sys
from importlib import import_module as _import_module
from types import FrameType as _FrameType
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

try:
    _import_module("mgpu_core._core")
except ImportError as error:
    raise ImportError(
        f"mgpu_core in {__path__[0]} has no compiled core that this Python can load ({error}). In the source folder of "
        "an installed package, start Python from another folder, or install it in place: "
        "pip install --no-build-isolation -e ."
    ) from error

if TYPE_CHECKING:
    from mgpu_core import comm, kernels, optim, trace
    from mgpu_core.data.device_loader import DeviceLoader
    from mgpu_core.data.tensor_loader import TensorLoader
    from mgpu_core.data_parallel import DataParallel, data_parallel
    from mgpu_core.errors import BackendUnavailable, CudaError, Error, NcclError
    from mgpu_core.inference.predictor import Predictor
    from mgpu_core.parallel import gather, parallel_apply, reduce, replicate, scatter, scatter_kwargs
    from mgpu_core.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
    from mgpu_core.pipeline.balance import balance
    from mgpu_core.pipeline.module import Pipeline
    from mgpu_core.pipeline.place import place
    from mgpu_core.ranks.team import Team
    from mgpu_core.step.train_step import TrainStep
    from mgpu_core.tensor_parallel.module import TensorParallel
    from mgpu_core.tools.advise import advise
    from mgpu_core.tools.explain.recorder import explain
    from mgpu_core.tools.run import replacing_torch
    from mgpu_core.trees.containers import register_container
    from mgpu_core.trees.nested import Replicate, Rows
    from mgpu_core.trees.weights import parameters_on_meta

__all__ = [
    "BackendUnavailable",
    "CudaError",
    "DataParallel",
    "DeviceLoader",
    "Error",
    "NcclError",
    "Pipeline",
    "Predictor",
    "Replicate",
    "Rows",
    "SyncBatchNorm",
    "Team",
    "TensorLoader",
    "TensorParallel",
    "TrainStep",
    "advise",
    "balance",
    "comm",
    "convert_sync_batchnorm",
    "data_parallel",
    "explain",
    "gather",
    "kernels",
    "optim",
    "parallel_apply",
    "parameters_on_meta",
    "place",
    "reduce",
    "register_container",
    "replacing_torch",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "trace",
]

_HOMES = {
    "tools.advise": ["advise"],
    "trees.containers": ["register_container"],
    "ranks.team": ["Team"],
    "data.device_loader": ["DeviceLoader"],
    "errors": ["BackendUnavailable", "CudaError", "Error", "NcclError"],
    "tools.explain.recorder": ["explain"],
    "inference.predictor": ["Predictor"],
    "trees.nested": ["Replicate", "Rows"],
    "parallel": ["gather", "parallel_apply", "reduce", "replicate", "scatter", "scatter_kwargs"],
    "pipeline.balance": ["balance"],
    "pipeline.module": ["Pipeline"],
    "pipeline.place": ["place"],
    "trees.weights": ["parameters_on_meta"],
    "tools.run": ["replacing_torch"],
    "parallel.sync_batchnorm": ["SyncBatchNorm", "convert_sync_batchnorm"],
    "tensor_parallel.module": ["TensorParallel"],
    "data.tensor_loader": ["TensorLoader"],
    "step.train_step": ["TrainStep"],
    "data_parallel": ["DataParallel", "data_parallel"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _import_module("importlib.metadata").version("mgpu-core")
    elif name in _HOME_OF:
        value = getattr(_import_module(f"mgpu_core.{_HOME_OF[name]}"), name)
    elif name in __all__:
        value = _import_module(f"mgpu_core.{name}")
    else:
        raise AttributeError(f"module 'mgpu_core' has no attribute {name!r}")
    globals()[name] = value
    return value


class _Package(_ModuleType):
    """The package, in which the function `data_parallel` is not hidden by the file of the same name."""

    @property
    def data_parallel(self) -> Any:
        return vars(self).get("data_parallel") or _import_module("mgpu_core.data_parallel").data_parallel

    @data_parallel.setter
    def data_parallel(self, value: Any) -> None:
        if not isinstance(value, _ModuleType):  # the file, which the import system puts here
            vars(self)["data_parallel"] = value

    @data_parallel.deleter
    def data_parallel(self) -> None:
        vars(self).pop("data_parallel", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _import_module, (self.__name__,)  # picklers know plain modules alone


_sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    frame: _FrameType | None = _sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "inspect"):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name == "docmodule":
        return []  # pydoc prints the whole help of each name that it sees: the docstring is the page
    return sorted([*__all__, "__version__"])
