// Events and pinned host memory, kept for the next caller: making either waits for the device.
#pragma once

#include <memory>

#include "core/device_ops.h"

namespace mgpu::cuda {

Event record_event(Stream on);
void wait_for_event(Stream on, const Event& event);  // the host waits by itself
bool event_reached(const Event& event);

std::shared_ptr<void> pinned(int64_t nbytes);
// Holds the memory until what is on the stream now has run.
void keep_pinned(Stream on, std::shared_ptr<void> memory);

}  // namespace mgpu::cuda
