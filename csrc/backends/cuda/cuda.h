// The door of the cuda room.  In a build without CUDA (no_cuda.cpp) it is empty and says so.
#pragma once

#include <string>

namespace mgpu::cuda {

bool built();
std::string detail();

// Devices that this build's runtime can use.  0 without a driver, and with one that is too old for this build.
int device_count();
// As CUDA writes versions: 13000 is 13.0.  0 where there is none.
int runtime_version();
int driver_version();

}  // namespace mgpu::cuda
