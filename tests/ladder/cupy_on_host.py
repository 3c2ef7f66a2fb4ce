"""A stand-in for cupy and the GPU: the twins' own CUDA C++, compiled by the host's g++, a thread for a thread.

What is tested so is the text of the kernels and the code around them; NVRTC and the hardware are not.
"""

import ctypes
import subprocess

import numpy as np

from benchmarks.ladder.twins.cupy_sources import SOURCES, compiler_options

TILE = 64
THREADS = 9  # a kernel's tables have up to 8 numbers that a thread each loads

_BEFORE = """
#include <pthread.h>
#include <thread>
#include <vector>
#define __global__
#define __device__
#define __shared__ static
#define __syncthreads() pthread_barrier_wait(&barrier)
struct Place { unsigned x; };
static Place blockIdx, blockDim;
static thread_local Place threadIdx;
static pthread_barrier_t barrier;
"""

_AFTER = """
template <class... Arguments> void launch(void (*kernel)(Arguments...), int blocks, Arguments... arguments) {
  pthread_barrier_init(&barrier, nullptr, blockDim.x = THREADS);
  for (blockIdx.x = 0; blockIdx.x < (unsigned)blocks; ++blockIdx.x) {
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < THREADS; ++i) threads.emplace_back([=] { threadIdx.x = i, kernel(arguments...); });
    for (std::thread& each : threads) each.join();
  }
}
"""

_RUNS = {
    "pack": """
extern "C" void run_pack(int blocks, const i64* pieces, int piece_count, OUT* flat, WIDE scale) {
  launch(pack, blocks, pieces, piece_count, flat, scale);
}""",
    "sum_ranks": """
extern "C" void run_sum_ranks(int blocks, const IN* const* in, int ranks, OUT* out, i64 count, IN divisor, bool same) {
  launch(sum_ranks, blocks, in, ranks, out, count, divisor, same);
}""",
    "sgd": """
extern "C" void run_prepare_sgd(int blocks, i64* segments, i64 rows, const double* groups, const float* clip,
                                const float* found_inf, double* constants) {
  launch(prepare_sgd, blocks, segments, rows, groups, clip, found_inf, constants);
}
extern "C" void run_sgd(int blocks, IN* parameters, const IN* gradients, IN* momenta, i64 count, const i64* segments,
                        i64 rows, const double* constants, bool together) {
  launch(sgd, blocks, parameters, gradients, momenta, count, segments, rows, constants, together);
}""",
}

_C_TYPES = {np.uint64: ctypes.c_void_p, np.int64: ctypes.c_int64, np.int32: ctypes.c_int32, np.bool_: ctypes.c_bool}
_C_TYPES |= {np.float32: ctypes.c_float, np.float64: ctypes.c_double}


def build(folder, name, *choice):
    """The shared library of one program."""
    options = [option for option in compiler_options(*choice) if option.startswith("-D") and "TILE" not in option]
    source, library = folder / f"{name}.cpp", folder / f"{name}-{len(list(folder.iterdir()))}.so"
    source.write_text(_BEFORE + SOURCES[name] + _AFTER + _RUNS[name])
    flags = ["-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-fsanitize=undefined"]
    flags += ["-fno-sanitize-recover=all", f"-DTILE={TILE}", f"-DTHREADS={THREADS}", *options]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True, timeout=100)
    return ctypes.CDLL(str(library))


def launch(library, name, blocks, *arguments):
    """Runs a kernel; the arguments are numpy's scalars, pointers among them."""
    getattr(library, f"run_{name}")(blocks, *(_C_TYPES[type(each)](each.item()) for each in arguments))
