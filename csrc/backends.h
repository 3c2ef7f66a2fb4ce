// The registry: the only file that knows which backends there are.  It returns the interfaces of the backend that
// serves a stream, whose device is the host or a GPU.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/nccl.h"
#include "core/collectives.h"
#include "core/device_ops.h"
#include "core/transfer.h"

namespace mgpu {

struct Backend {
  std::string name;
  bool built;
  std::string detail;  // what it is, or why it is missing
};

std::vector<Backend> backends();

// They throw BackendUnavailable for a GPU's stream where the cuda backend is not built, and InvalidArgument for a team
// that mixes the host with GPUs.
DeviceOps& device_ops_of(Stream on);
Collectives& collectives_of(const Streams& streams);
Transfer& transfer_of(const Streams& streams);

// Threads that share one call on host memory.
int host_threads();
void set_host_threads(int threads);

// GPUs and versions that the cuda backend finds; 0 if it is not built or finds none.  13000 is version 13.0.
int cuda_device_count();
int cuda_runtime_version();
int cuda_driver_version();
bool cuda_has_code_for(int device);
// Throws InvalidArgument unless the GPU reaches the memory; the core's other functions trust the pointers they are
// given.
void cuda_check_memory(const void* pointer, int device, const std::string& name);
// Lets kernels of the first touch the memory of the second, in each pair; a test must have shown that it works.
void cuda_allow_peers(const std::vector<std::pair<int, int>>& device_and_peer);

}  // namespace mgpu
