#include "backends/cuda/cuda.h"
#include "core/error.h"

namespace mgpu::cuda {
namespace {

std::string detail() { return "this build has no CUDA: install again with MGPU_CUDA=on"; }
int none() { return 0; }

}  // namespace

const Backend& backend() {
  static const Backend missing{"cuda",
                               false,
                               detail,
                               []() -> DeviceOps& { throw BackendUnavailable(detail()); },
                               [](int device, int peer) { return device == peer; },
                               none,
                               none,
                               none,
                               [](int) { return false; },
                               [](const void*, int, const std::string&) { throw BackendUnavailable(detail()); },
                               [](const std::vector<std::pair<int, int>>&) { throw BackendUnavailable(detail()); }};
  return missing;
}

}  // namespace mgpu::cuda
