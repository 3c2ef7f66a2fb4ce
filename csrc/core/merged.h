// Ranks that share a device are summed there first, so that an algorithm between devices sees each device once.
#pragma once

#include <functional>

#include "core/collectives.h"

namespace mgpu {

// An all-reduce in place of one buffer per device, in the order in which the devices first come.
using AmongDevices = std::function<void(const Buffers& inout, const Streams& streams)>;

// Adds the ranks of each device into the output of the first of them, in rank order and without avg's division, calls
// `among` on these, and copies the results to the other ranks.
void merged_all_reduce(DeviceOps& ops, const Buffers& in, const Buffers& out, ReduceOp op, const Streams& streams,
                       const AmongDevices& among);

// Whether two ranks have the same device.
bool share_devices(const Streams& streams);

}  // namespace mgpu
