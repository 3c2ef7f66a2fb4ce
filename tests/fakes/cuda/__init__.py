"""The core with its cuda room on the fake CUDA runtime, serving the fake accelerator's devices.

So the whole road in Python runs through the cuda room, its kernels included, on a machine without a GPU: pointers,
counts, streams and devices go the way that a GPU's would.  Work is done at once: order is for the C++ tests to prove.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import torch

__all__ = ["serve", "take_the_cores_place", "what_is_missing"]

_ROOT = Path(__file__).parents[3]
_BUILD = _ROOT / "build" / f"fake_core-{sys.implementation.cache_tag}"
DEVICES = 4


def what_is_missing() -> str | None:
    """Why the fake core cannot be built here, or ``None``."""
    for tool in ("c++", "cmake", "ninja"):
        if shutil.which(tool) is None:
            return f"the core on the fake CUDA runtime needs {tool}"
    if importlib.util.find_spec("pybind11") is None:
        return "the core on the fake CUDA runtime needs pybind11"
    return None


def take_the_cores_place() -> None:
    """Makes this build the ``mgpu_core._core`` of the process; before anybody imports mgpu_core."""
    assert "mgpu_core" not in sys.modules, "too late: mgpu_core has its core already"
    os.environ["FAKE_CUDA_DEVICES"] = str(DEVICES)
    spec = importlib.util.spec_from_file_location("mgpu_core._core", _build())
    module = importlib.util.module_from_spec(spec)
    sys.modules["mgpu_core._core"] = module
    spec.loader.exec_module(module)


def serve(device_type: str) -> None:
    """From now on the cuda room serves the devices of this type; all of them reach each other."""
    import mgpu_core
    from mgpu_core import _core
    from mgpu_core.comm import rooms, tuning
    from mgpu_core.device import streams

    mgpu_core._core = _core  # as importing it by its name would have done
    _core.cuda_allow_peers(list(permutations(range(DEVICES), 2)))
    streams.GPU_TYPE = device_type
    streams._handle = lambda device: 0
    streams._cuda_room_works = streams._has_code_for = lambda *gpu: True
    streams.settle_peers = lambda devices: None
    tuning.choose = lambda devices, nbytes, run: "direct"
    torch.cuda.is_current_stream_capturing = lambda: False
    rooms._NARROW_NBYTES = 0  # so that the small tensors of the tests take this road too


def _build() -> Path:
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "in_use", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pybind11 = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True).strip()
        choices = ["-DMGPU_FAKE_CUDA=ON", "-DMGPU_CUDA=off", "-DCMAKE_BUILD_TYPE=Release"]
        python = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"]
        _run(["cmake", "-S", str(_ROOT), "-B", str(_BUILD), "-G", "Ninja", *choices, *python])
        _run(["cmake", "--build", str(_BUILD), "--target", "_core"])
    (made,) = _BUILD.glob("_core*.so")
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
