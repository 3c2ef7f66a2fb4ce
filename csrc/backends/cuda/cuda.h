// The interface of the cuda backend.  In a build without CUDA (no_cuda.cpp) it is empty and says so.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/device_ops.h"

namespace mgpu::cuda {

bool built();
std::string detail();

// Devices that this build's runtime can use.  0 without a driver, and with one that is too old for this build.
int device_count();
// As CUDA writes versions: 13000 is 13.0.  0 where there is none.
int runtime_version();
int driver_version();

// Whether this build has machine code, or code that its driver compiles, for the device.
bool has_code_for(int device);

// Throws InvalidArgument unless work on `on` may touch the memory: its device's own, a peer's in reach, pinned or
// managed.  A kernel that finds out itself ends all CUDA work of the process.
void require_reachable(const void* pointer, Stream on, const char* what);

// Throws BackendUnavailable where the backend is not built.
DeviceOps& device_ops();

// Whether `device` may touch the memory of `peer`: itself, and those that were allowed.  Nobody is allowed before a
// test has shown that what one writes the other reads (GPUs behind some bridges say they can, and lose data).
bool reach(int device, int peer);
// If one pair cannot be enabled, throws, and none of the call's is allowed.
void allow_peers(const std::vector<std::pair<int, int>>& device_and_peer);

}  // namespace mgpu::cuda
