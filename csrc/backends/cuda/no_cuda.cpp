#include "backends/cuda/cuda.h"

namespace mgpu::cuda {

bool built() { return false; }
std::string detail() { return "this build has no CUDA: install again with MGPU_CUDA=on"; }
int device_count() { return 0; }
int runtime_version() { return 0; }
int driver_version() { return 0; }

}  // namespace mgpu::cuda
