// Events and pinned host memory, kept for the next caller: making either waits for the device.
#pragma once

#include <memory>

#include "core/pieces.h"

namespace mgpu::cuda {

Event record_event(Stream on);
void wait_for_event(Stream on, const Event& event);  // the host waits by itself
bool event_reached(const Event& event);

// The limit of pinned memory, in use and idle together.  A call that needs more at once gets it; the excess is freed
// later.
constexpr int64_t kMostPinnedNbytes = 3 * kPieceNbytes;
// A block that this many requests in a row did not use is freed.
constexpr int64_t kIdleRequests = 1000;

// Returns memory of at least `nbytes`.  Where the limit leaves no room, waits on the host until earlier work on
// the streams of `users` has run; while one of them is captured into a graph, neither waits nor frees.
std::shared_ptr<void> pinned(int64_t nbytes, const Streams& users);
// Whether what is put on the stream goes into a graph.
bool is_capturing(Stream on);
// Holds the memory until what is on the stream now has run.  A captured stream holds it for ever.
void keep_pinned(Stream on, std::shared_ptr<void> memory);

}  // namespace mgpu::cuda
