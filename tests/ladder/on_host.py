"""The ladder's CUDA C++ without a GPU: the same files compiled by g++, and run a thread after the other.

One library per kernel holds its launchers (`kernels/*.cu`), which ctypes calls as it calls nvcc's, and each kernel by
its C++ name, which stand for what cupy compiles. A misaligned access of a vector ends the process, as on a GPU.
"""

import ctypes
import itertools
import subprocess
from pathlib import Path

import numpy as np

from benchmarks.ladder.cuda_library import KERNELS

HERE = Path(__file__).parent
FLAGS = ["-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
FLAGS += ["-fsanitize=undefined", "-fno-sanitize-recover=all", "-Wno-narrowing"]
TYPES = ("float", "__half")
RUNGS = ("naive", "coalesced", "vectorised")


def names(kernel):
    """All kernels of a .cuh file, by their C++ names."""
    pairs = [f"{one}, {other}" for one, other in itertools.product(TYPES, TYPES)]
    if kernel == "pack":
        return [f"pack_{rung}<{pair}>" for rung in (*RUNGS, "fused") for pair in pairs]
    if kernel == "sum_ranks":
        steps = [f"sum_{rung}<{pair}>" for rung in RUNGS for pair in pairs if pair != "float, __half"]
        return steps + [f"sum_fused<{one}>" for one in TYPES]
    picks = [f"pick_{rung}" for rung in RUNGS]
    return picks + [f"{name}<{one}>" for one in TYPES for name in (*(f"normalise_{r}" for r in RUNGS), "gather_fused")]


def build(kernel, folder):
    """The shared library."""
    source, library = folder / f"{kernel}.cpp", folder / f"{kernel}.so"
    runs = "".join(_RUN.format(number=number, name=name) for number, name in enumerate(names(kernel)))
    source.write_text(f'#include "{kernel}.cu"\n{runs}')
    folders = [f"-I{KERNELS}", f"-I{HERE.parent / 'fakes' / 'cuda' / 'include'}", f"-I{HERE}"]
    command = ["g++", *FLAGS, *folders, "-include", "host.h", str(source), str(HERE / "host.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    return ctypes.CDLL(str(library))


_RUN = """
extern "C" int run_{number}(unsigned blocks, void** arguments) {{
  return cudaLaunchKernel({name}, dim3(blocks), dim3(kThreads), arguments, 0, nullptr);
}}
"""


def run(library, kernel, name, blocks, arguments):
    """Runs a kernel as cupy would be asked to; the arguments are numpy's scalars, pointers among them."""
    memory = [np.array(each) for each in arguments]
    assert all(each.dtype in (np.uint64, np.int64, np.int32, np.float32) for each in memory)
    pointers = (ctypes.c_void_p * len(memory))(*(each.ctypes.data for each in memory))
    assert getattr(library, f"run_{names(kernel).index(name)}")(ctypes.c_uint(blocks), pointers) == 0
