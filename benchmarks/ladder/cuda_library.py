"""Finds nvcc, and builds the launchers of `kernels/*.cu` into one small shared library per kernel.

The name of a library tells what it was made of: a hash of the sources and of the command. So there is nothing to clean
and nothing stale: sources that changed make another name. The libraries lie in `build/ladder`, which git ignores.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ladder.rungs import Unavailable

KERNELS = Path(__file__).parent / "kernels"
BUILD = Path(__file__).resolve().parents[2] / "build" / "ladder"
ARCH = "sm_90"
"""Compiled for where no GPU says otherwise."""
SECONDS = 300.0
FLAGS = ("-shared", "-Xcompiler", "-fPIC", "-std=c++17", "-O3", "--fmad=false")
"""No fused multiply-add: the bits of the reference."""


def nvcc() -> Path:
    """CUDA's compiler: named by CUDACXX, of the machine, or of the wheel nvidia-cuda-nvcc from PyPI.

    Raises:
        Unavailable: there is none.
    """
    for path in _candidates():
        if os.access(path, os.X_OK):
            return path
    raise Unavailable("no nvcc: install CUDA's toolkit, or nvidia-cuda-nvcc from PyPI, or name one in CUDACXX")


def _candidates() -> Iterator[Path]:
    yield from (Path(name) for name in (os.environ.get("CUDACXX"), shutil.which("nvcc")) if name)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            yield Path(folder) / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(base).glob("cu*/bin/nvcc"), reverse=True)


def command(kernel: str, arch: str, library: Path) -> list[str]:
    """What builds a library. The wheel's libraries lie in lib, where its nvcc looks for lib64."""
    compiler = nvcc()
    folders = [f"-L{folder}" for folder in (compiler.parents[1] / "lib",) if folder.is_dir()]
    return [str(compiler), *FLAGS, f"-arch={arch}", *folders, str(KERNELS / f"{kernel}.cu"), "-o", str(library)]


def build(kernel: str, arch: str = ARCH, folder: Path = BUILD) -> Path:
    """The library of a kernel's rungs; compiled unless it is there.

    Raises:
        Unavailable: no nvcc, or the compiler's own words.
    """
    library = folder / f"{kernel}-{arch}-{_fingerprint(kernel, arch)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    new = library.with_suffix(f".{os.getpid()}.new")
    done = subprocess.run(command(kernel, arch, new), capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        new.unlink(missing_ok=True)
        raise Unavailable(f"nvcc cannot compile {kernel}.cu for {arch}:\n{done.stderr.strip()[-2000:]}")
    new.replace(library)  # whole or not at all, also when two processes build
    return library


def _fingerprint(kernel: str, arch: str) -> str:
    sources = [KERNELS / name for name in (f"{kernel}.cu", f"{kernel}.cuh", "common.cuh", "launch.cuh")]
    made_of = b"\0".join([*(path.read_bytes() for path in sources), *map(str.encode, command(kernel, arch, Path("x")))])
    return hashlib.sha256(made_of).hexdigest()[:12]


def opened(path: Path) -> ctypes.CDLL:
    """The library, its functions ready to be called.

    Raises:
        Unavailable: it cannot be opened here.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path.name}: {error}") from error
