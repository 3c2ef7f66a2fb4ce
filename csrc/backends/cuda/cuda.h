// The interface of the cuda backend.  A build without CUDA (no_cuda.cpp) has `backend` alone, which says so.
#pragma once

#include "core/backend.h"

namespace mgpu::cuda {

const Backend& backend();

// What it is made of; core/backend.h says what each does.
DeviceOps& device_ops();
int device_count();
int runtime_version();
int driver_version();
bool has_code_for(int device);
// A kernel that finds out itself that it does not reach the memory ends all CUDA work of the process.  The device
// reaches its own memory, that of peers in reach, pinned and managed memory.
void check_memory(const void* pointer, int device, const std::string& name);
// No device reaches another before a test has shown that what one writes the other reads (GPUs behind some bridges say
// that they can, and lose data).
bool reach(int device, int peer);
// If one pair cannot be enabled, throws, and none of the call's is allowed.
void allow_peers(const std::vector<std::pair<int, int>>& device_and_peer);

}  // namespace mgpu::cuda
