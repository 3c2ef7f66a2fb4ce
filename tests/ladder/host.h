// What the ladder's kernels need beside the fake CUDA runtime of tests/fakes to be read and run by a host's compiler.
// Included before each of them by the compiler's command line.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

extern dim3 gridDim;

inline void __stwb(uint4* to, uint4 value) { *to = value; }
