// The one place that knows which rooms there are.  Whoever wants memory moved asks here for a door.
#pragma once

#include <string>
#include <vector>

#include "core/collectives.h"
#include "core/device_ops.h"

namespace mgpu {

struct Room {
  std::string name;
  bool built;
  std::string detail;  // what it is, or why it is missing
};

std::vector<Room> rooms();

// The doors of the room whose memory is the host's, and how many threads share one of its calls.
DeviceOps& host_device_ops();
Collectives& host_collectives();
int host_threads();
void set_host_threads(int threads);

// What the cuda room sees; 0 where it is not built or finds nothing.  Versions as CUDA writes them: 13000 is 13.0.
int cuda_device_count();
int cuda_runtime_version();
int cuda_driver_version();

}  // namespace mgpu
