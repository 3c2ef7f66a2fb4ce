// Makes a device the current one of this thread, and the one before it again at the end.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/check.h"

namespace mgpu::cuda {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline cudaStream_t handle_of(Stream on) { return static_cast<cudaStream_t>(on.handle); }

}  // namespace mgpu::cuda
