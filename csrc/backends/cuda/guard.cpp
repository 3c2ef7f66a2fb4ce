#include "backends/cuda/guard.h"

#include <array>
#include <mutex>

namespace mgpu::cuda {
namespace {

// The driver's functions, by its own names; found through the runtime, so that nothing links the driver.
using Context = void*;
struct Driver {
  int (*retain)(Context* context, int device);
  int (*push)(Context context);
  int (*pop)(Context* context);
};

template <class Function>
void find(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status), name);
#else
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status), name);
#endif
  if (status != cudaDriverEntryPointSuccess || !found)
    throw CudaError(std::string(name) + ": the driver does not have it", cudaErrorInsufficientDriver);
  function = reinterpret_cast<Function>(found);
}

const Driver& driver() {
  static const Driver found = [] {
    Driver driver{};
    find("cuDevicePrimaryCtxRetain", driver.retain);
    find("cuCtxPushCurrent", driver.push);
    find("cuCtxPopCurrent", driver.pop);
    return driver;
  }();
  return found;
}

// The driver's codes are the runtime's.
void check_driver(int code, const char* call) { check(static_cast<cudaError_t>(code), call); }

constexpr int kMostDevices = 64;

// Retained at first use and for good: torch's memory lives there too.
Context primary_context(int device) {
  static auto* mutex = new std::mutex;
  static std::array<Context, kMostDevices> contexts{};
  if (device < 0 || device >= kMostDevices) check(cudaErrorInvalidDevice, "cuDevicePrimaryCtxRetain");
  const std::lock_guard<std::mutex> lock(*mutex);
  if (!contexts[device]) check_driver(driver().retain(&contexts[device], device), "cuDevicePrimaryCtxRetain");
  return contexts[device];
}

}  // namespace

DeviceGuard::DeviceGuard(int device) { check_driver(driver().push(primary_context(device)), "cuCtxPushCurrent"); }

DeviceGuard::~DeviceGuard() {
  Context popped = nullptr;
  driver().pop(&popped);
}

}  // namespace mgpu::cuda
