#include "backends/cuda/cuda.h"
#include "core/error.h"

namespace mgpu::cuda {

bool built() { return false; }
std::string detail() { return "this build has no CUDA: install again with MGPU_CUDA=on"; }
int device_count() { return 0; }
int runtime_version() { return 0; }
int driver_version() { return 0; }
bool has_code_for(int) { return false; }
void require_reachable(const void*, Stream, const char*) { throw BackendUnavailable(detail()); }

DeviceOps& device_ops() { throw BackendUnavailable(detail()); }
bool reach(int device, int peer) { return device == peer; }
void allow_peers(const std::vector<std::pair<int, int>>&) { throw BackendUnavailable(detail()); }

}  // namespace mgpu::cuda
