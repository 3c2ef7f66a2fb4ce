"""Two families of errors.

``ValueError`` and ``TypeError`` are the caller's mistakes, raised before anything is written.  The classes here are the
machine's: a device, a driver, a library.  They are made in C++, so that both halves of the package raise the same ones.
"""

from __future__ import annotations

from mgpu_core._core import BackendUnavailable, CudaError, Error, NcclError

__all__ = ["BackendUnavailable", "CudaError", "Error", "NcclError"]
