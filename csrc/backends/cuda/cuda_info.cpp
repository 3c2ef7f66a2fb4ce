// Devices and versions.  The runtime is linked statically and opens the driver at the first call, so the module
// imports, and answers, on a machine without one.
#include "backends/cuda/check.h"
#include "backends/cuda/cuda.h"

namespace mgpu::cuda {

namespace {

std::string detail() {
  const int version = runtime_version();
  return "CUDA runtime " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
         ", architectures " MGPU_CUDA_ARCHS;
}

}  // namespace

const Backend& backend() {
  static const Backend cuda{"cuda",          true,           detail,       device_ops,   reach,      device_count,
                            runtime_version, driver_version, has_code_for, check_memory, allow_peers};
  return cuda;
}

int device_count() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaErrorInsufficientDriver || code == cudaErrorNoDevice) {
    cudaGetLastError();
    return 0;
  }
  check(code, "cudaGetDeviceCount");
  return count;
}

int runtime_version() {
  int version = 0;
  check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  return version;
}

int driver_version() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  return version;
}

}  // namespace mgpu::cuda
