#include "core/device_ops.h"

#include "core/error.h"

namespace mgpu {

void DeviceOps::push_sum(const PushSum&, Stream) {
  throw BackendUnavailable("push works between GPUs that reach each other's memory");
}

bool in_reach(const Reach& reach, const Streams& streams) {
  for (const Stream& one : streams)
    for (const Stream& other : streams)
      if (!one.same_device(other) && !reach(one.device, other.device)) return false;
  return true;
}

void order(DeviceOps& ops, Stream first, Stream later) {
  if (first != later) ops.wait(later, ops.record(first));
}

void barrier(DeviceOps& ops, const Streams& streams) {
  // All streams meet at the first one and leave from there: 2 n waits instead of n squared.
  for (size_t i = 1; i < streams.size(); ++i) order(ops, streams[i], streams[0]);
  if (streams.size() < 2) return;
  const Event all = ops.record(streams[0]);
  for (size_t i = 1; i < streams.size(); ++i)
    if (streams[i] != streams[0]) ops.wait(streams[i], all);
}

int64_t norm_tiles(const std::vector<Piece>& pieces) {
  int64_t tiles = 0;
  for (const Piece& piece : pieces) tiles += (piece.count + kNormTile - 1) / kNormTile;
  return tiles;
}

}  // namespace mgpu
