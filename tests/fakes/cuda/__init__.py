"""The core with its cuda backend on the fake CUDA runtime, serving the fake accelerator's devices.

So all Python code runs through the cuda backend, its kernels included, on a machine without a GPU: pointers,
counts, streams and devices go the way that a GPU's would.  Work is done at once: order is for the C++ tests to prove.
With ``MGPU_TEST_PTX`` the kernels run from nvcc's PTX; without it, as the host's compiler made them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from itertools import permutations
from pathlib import Path

import torch
from fakes import native_build, ptx

DEVICES = 4


def replace_core() -> None:
    """Makes this build the ``mgpu_core._core`` of the process; before anybody imports mgpu_core."""
    assert "mgpu_core" not in sys.modules, "too late: mgpu_core has its core already"
    os.environ["FAKE_CUDA_DEVICES"] = str(DEVICES)
    spec = importlib.util.spec_from_file_location("mgpu_core._core", _build())
    module = importlib.util.module_from_spec(spec)
    sys.modules["mgpu_core._core"] = module
    spec.loader.exec_module(module)


def serve(device_type: str) -> None:
    """From now on the cuda backend serves the devices of this type; all of them reach each other."""
    import mgpu_core
    from mgpu_core import _core
    from mgpu_core.comm import layout, tuning
    from mgpu_core.devices import streams

    mgpu_core._core = _core  # as importing it by its name would have done
    _core.allow_peers("cuda", list(permutations(range(DEVICES), 2)))
    streams.GPU_TYPE = device_type
    streams._handle = lambda device: 0
    streams._cuda_backend_works = streams._has_code_for = lambda *gpu: True
    streams.settle_peers = lambda devices: None
    streams.have_proved_access = lambda *pair: True
    tuning.choose = lambda devices, nbytes, run: "direct"
    torch.cuda.is_current_stream_capturing = lambda: False
    layout._NARROW_NBYTES = 0  # so that the small tensors of the tests take this way too


def _build() -> Path:
    architecture = ptx.wanted_architecture()
    native_build.build("_core", *([f"ptx_{architecture}"] if architecture else []))
    (made,) = native_build.FOLDER.glob("_core*.so")
    return made


def faults() -> list[str]:
    """Return what the PTX machine found in kernels since the last call; nothing where the host runs them."""
    return ptx.take_faults(ctypes.CDLL(sys.modules["mgpu_core._core"].__file__))
