// Two checks with two jobs: `check` turns a CUDA error code into a CudaError that names the call; `require_reachable`
// looks at a pointer before a kernel does, because what a kernel finds out takes the whole process's CUDA down.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/device_ops.h"
#include "core/error.h"

namespace mgpu::cuda {

inline void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call must not report this one's failure
  throw CudaError(std::string(call) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")", code);
}

// Throws InvalidArgument unless work on `on` may touch the memory: its device's own, a peer's in reach, or pinned.
void require_reachable(const void* pointer, Stream on, const char* what);

}  // namespace mgpu::cuda
