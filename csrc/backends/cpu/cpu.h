// The interface of the cpu backend: host memory, plain loops, our own threads.  It is the reference for every other
// backend.
#pragma once

#include "core/backend.h"

namespace mgpu::cpu {

// One device, whose memory all work reaches.
const Backend& backend();
DeviceOps& device_ops();

// Threads that share one call, the caller included.  At first the processors of this process, or MGPU_CORE_NUM_THREADS.
int num_threads();
void set_num_threads(int threads);

}  // namespace mgpu::cpu
