"""The CMake build tree of the tests' native parts: the core on the fake CUDA runtime, and the PTX machine."""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
FOLDER = _ROOT / "build" / f"fake_core-{sys.implementation.cache_tag}"


def what_is_missing() -> str | None:
    """Return why nothing can be built here, or ``None``."""
    for tool in ("c++", "cmake", "ninja"):
        if shutil.which(tool) is None:
            return f"the tests' native parts need {tool}"
    if importlib.util.find_spec("pybind11") is None:
        return "the tests' native parts need pybind11"
    return None


def build(*targets: str) -> None:
    """Build targets in :data:`FOLDER`; processes that do so at the same time wait for each other."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "in_use", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pybind11 = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True).strip()
        choices = ["-DMGPU_FAKE_CUDA=ON", "-DMGPU_CUDA=off", "-DCMAKE_BUILD_TYPE=Release"]
        python = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"]
        _run(["cmake", "-S", str(_ROOT), "-B", str(FOLDER), "-G", "Ninja", *choices, *python])
        if targets:
            _run(["cmake", "--build", str(FOLDER), "--target", *targets])


def cached(variable: str) -> str:
    """Return a variable of the configured build tree; empty where it was not found."""
    for line in (FOLDER / "CMakeCache.txt").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.partition(":")[0] == variable:
            return "" if value.endswith("-NOTFOUND") else value
    return ""


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
