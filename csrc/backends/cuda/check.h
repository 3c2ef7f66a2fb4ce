// `check` turns a CUDA error code into a CudaError that names the call.
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

}  // namespace mgpu::cuda
