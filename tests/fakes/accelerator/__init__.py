"""A fake accelerator, ``fake:0`` to ``fake:3``, for machines that have none: devices of host memory, compiled here.

A second kind, ``tpu``, has the rules of the plug-in for TPUs (``tpu_module.py``): a process may use one of the four.
Registering it makes it *the* accelerator of the process, for good; so the tests that use it run in a process of their
own, which ``tests/fakes/on_the_fake.py`` starts with the variable :data:`WANTED` set.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from fakes.accelerator import device_module, tpu_module

WANTED = "MGPU_TEST_FAKE"

_HERE = Path(__file__).parent
_FOLDER = _HERE.parents[2] / "build" / f"fake_accelerator-torch-{torch.__version__}"


def is_wanted() -> bool:
    """Whether this is a process that has the fake accelerator."""
    return os.environ.get(WANTED) in ("1", "cuda", "tpu")


def by_the_cuda_backend() -> bool:
    """Whether the core's cuda backend serves it, on the fake CUDA runtime; else the torch backend does."""
    return os.environ.get(WANTED) == "cuda"


def has_tpu_rules() -> bool:
    """Whether it is of the kind that gives a process one device, which ranks share."""
    return os.environ.get(WANTED) == "tpu"


def fakes(ranks: int) -> list[str]:
    """That many ranks on the fake devices, in a circle."""
    return ["tpu:0"] * ranks if has_tpu_rules() else [f"fake:{rank % 4}" for rank in range(ranks)]


_FIRST, _SECOND = fakes(2)
TEAMS = [fakes(1), fakes(2), fakes(3), fakes(8), [_FIRST, "cpu"], ["cpu", _SECOND], [_SECOND, _FIRST, "cpu"]]


def what_is_missing() -> str | None:
    """Why the fake cannot be compiled here, or ``None``."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"the fake accelerator needs a C++ compiler: there is no {compiler}"
    if shutil.which("ninja") is None:
        return "the fake accelerator needs ninja to be compiled"
    if find_spec("setuptools") is None:
        return "the fake accelerator needs setuptools, which torch's extension loader imports"
    return None


def register() -> None:
    """Makes ``fake``, or ``tpu``, the accelerator of this process; compiles it where that has not been done yet."""
    device_module.built = _build()
    name, module = ("tpu", tpu_module) if has_tpu_rules() else ("fake", device_module)
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def compile_before() -> None:
    """Compile it in a process of its own, before processes that wait for each other for half a minute need it."""
    command = "from fakes import accelerator; accelerator.register()"
    subprocess.run([sys.executable, "-c", command], cwd=_HERE.parents[1], check=True, timeout=600)


def _build() -> Any:
    from torch.utils import cpp_extension  # slow, says things about CUDA, and is for this process only

    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(_FOLDER / "in_use", "w") as file:
        # Unlike torch's own lock, a file that stays behind when its process is killed, this one ends with its holder.
        fcntl.flock(file, fcntl.LOCK_EX)
        (_FOLDER / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "mgpu_fake_accelerator",
            [str(_HERE / name) for name in ("devices.cpp", "kernels.cpp", "fallback.cpp")],
            extra_cflags=["-O1"],
            build_directory=str(_FOLDER),
        )
