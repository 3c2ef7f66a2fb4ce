"""The forward pass, one step a file: scatter, replicate, apply, gather, and reduce."""

from mgpu_core.parallel.apply import parallel_apply
from mgpu_core.parallel.gather_outputs import gather
from mgpu_core.parallel.reduce_tensors import reduce
from mgpu_core.parallel.replicate_modules import replicate
from mgpu_core.parallel.scatter_inputs import scatter, scatter_kwargs

__all__ = ["gather", "parallel_apply", "reduce", "replicate", "scatter", "scatter_kwargs"]
