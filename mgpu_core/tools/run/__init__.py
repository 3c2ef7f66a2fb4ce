"""A script that uses ``torch.nn.DataParallel``, run unchanged on ours: ``mgpu run`` and ``replacing_torch``."""

from mgpu_core.tools.run.names import Replaced, replacing_torch

__all__ = ["Replaced", "replacing_torch"]
