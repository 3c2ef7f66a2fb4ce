// Events and pinned host memory, kept for the next caller: making either waits for the device.
#pragma once

#include <memory>

#include "core/device_ops.h"

namespace mgpu::cuda {

// An event of the device, not recorded yet; it goes back to the pool with its last owner.
Event new_event(int device);

std::shared_ptr<void> pinned(int64_t nbytes);
// Holds the memory until what is on the stream now has run.
void keep_pinned(Stream on, std::shared_ptr<void> memory);

}  // namespace mgpu::cuda
