"""Runs CUDA kernels from their PTX on the CPU: see ``machine.h`` for what it checks and what it does not model.

Tests either use :class:`Machine` on PTX of their own, or let the fake CUDA runtime run the package's kernels on it
(``MGPU_TEST_PTX``, see ``launches.h``).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fakes import native_build

WANTED = "MGPU_TEST_PTX"  # the architecture whose PTX the fake CUDA runtime runs; see launches.h
_TEXT_NBYTES = 1 << 20


@cache
def what_is_missing() -> str | None:
    """Return why no PTX can be made or run here, or ``None``."""
    if reason := native_build.what_is_missing():
        return reason
    native_build.build()
    return None if native_build.cached("MGPU_PTX_NVCC") else "no nvcc, which makes the kernels' PTX"


def compile_ptx(source: Path, architecture: int | str, *options: str) -> str:
    """Return the PTX of a CUDA source for an architecture such as 75, without fused multiply-add, as the build does."""
    nvcc = native_build.cached("MGPU_PTX_NVCC")
    flags = ["-ptx", f"-arch=compute_{architecture}", "-O3", "-std=c++17", "-fmad=false", "-lineinfo"]
    command = [nvcc, *flags, "-Wno-deprecated-gpu-targets", *options, str(source), "-o", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


class Machine:
    """Kernels of one PTX text, and the memory that they may access.

    Raises:
        RuntimeError: the text has an instruction that the machine does not know, or a launch does not fit its kernel.
    """

    def __init__(self, text: str) -> None:
        self._library = _library()
        self._machine = ctypes.c_void_p(self._library.ptx_new())
        self._checked(self._library.ptx_load(self._machine, text.encode()))

    def __del__(self) -> None:
        self._library.ptx_delete(self._machine)

    def kernels(self) -> list[str]:
        """Return the kernels' symbols."""
        return self._text(self._library.ptx_kernels)

    def add_memory(self, memory: np.ndarray[Any, Any], name: str = "memory", *, initialized: bool = True) -> None:
        """Let kernels access exactly the bytes of an array."""
        self._library.ptx_add(self._machine, memory.ctypes.data, memory.nbytes, initialized, name.encode())

    def allow_unknown_memory(self) -> None:
        """Let kernels access any memory; alignment, races, barriers and registers are still checked."""
        self._library.ptx_allow_unknown_memory(self._machine)

    def launch(self, kernel: str, blocks: int, threads: int, arguments: Iterable[Any], *, seed: int = 0) -> list[str]:
        """Run a kernel and return the faults.

        Args:
            arguments: numpy scalars or bytes of the parameters' sizes; an array stands for its address.
            seed: 0 runs blocks and warps in order; another number is a random schedule.
        """
        memory = [np.frombuffer(_bytes_of(each), np.uint8) for each in arguments]
        pointers = (ctypes.c_void_p * len(memory))(*(each.ctypes.data for each in memory))
        sizes = (ctypes.c_size_t * len(memory))(*(each.nbytes for each in memory))
        name = kernel.encode()
        launched = self._library.ptx_launch(self._machine, name, blocks, threads, pointers, sizes, len(memory), seed)
        self._checked(launched)
        return self._text(self._library.ptx_take_faults)

    def parameters(self, kernel: str) -> list[int]:
        """Return the bytes of each parameter of a kernel."""
        sizes = (ctypes.c_size_t * 64)()
        count = self._checked(self._library.ptx_parameters(self._machine, kernel.encode(), sizes, 64))
        return list(sizes[:count])

    def _checked(self, code: int) -> int:
        if code < 0:
            raise RuntimeError(self._library.ptx_error().decode())
        return code

    def _text(self, function: Any) -> list[str]:
        text = ctypes.create_string_buffer(_TEXT_NBYTES)
        function(self._machine, text, _TEXT_NBYTES)
        return text.value.decode().splitlines()


def take_faults(core: ctypes.CDLL) -> Sequence[str]:
    """Return what the PTX machine of a core on the fake CUDA runtime found since the last call."""
    text = ctypes.create_string_buffer(_TEXT_NBYTES)
    core.mgpu_ptx_take_faults(text, ctypes.c_size_t(_TEXT_NBYTES))
    return text.value.decode().splitlines()


def wanted_architecture() -> str | None:
    """Return the architecture whose PTX this process runs, or ``None`` for the host compiler's kernels."""
    return os.environ.get(WANTED) or None


def _bytes_of(argument: Any) -> bytes:
    if isinstance(argument, np.ndarray):
        return np.uint64(argument.ctypes.data).tobytes()
    return argument if isinstance(argument, bytes) else argument.tobytes()


@cache
def _library() -> ctypes.CDLL:
    native_build.build("ptx_library")
    (path,) = native_build.FOLDER.rglob("libptx_library.so")
    library = ctypes.CDLL(str(path))
    library.ptx_new.restype = ctypes.c_void_p
    library.ptx_error.restype = ctypes.c_char_p
    library.ptx_add.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    launch = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32]
    library.ptx_launch.argtypes = [*launch, *[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_uint64]
    for function in (library.ptx_delete, library.ptx_add, library.ptx_kernels, library.ptx_take_faults):
        function.restype = None
    return library
