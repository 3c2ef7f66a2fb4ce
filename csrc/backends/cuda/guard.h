// Makes a device the current one of this thread, and what was current before it again at the end.
//
// Not by cudaSetDevice: from CUDA 12 on, setting a device back makes a context there, some hundred MB on a GPU that
// nobody asked for, and fails where another process has that GPU to itself.  So the device's primary context is pushed
// and popped; a thread that had none has none afterwards.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/check.h"

namespace mgpu::cuda {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
};

inline cudaStream_t handle_of(Stream on) { return static_cast<cudaStream_t>(on.handle); }

}  // namespace mgpu::cuda
