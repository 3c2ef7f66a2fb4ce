#include "core/device_ops.h"

namespace mgpu {

void order(DeviceOps& ops, Stream first, Stream later) {
  if (first != later) ops.wait(later, ops.record(first));
}

void barrier(DeviceOps& ops, const Streams& streams) {
  std::vector<Event> events;
  for (const Stream& stream : streams) events.push_back(ops.record(stream));
  for (size_t waiting = 0; waiting < streams.size(); ++waiting)
    for (size_t other = 0; other < streams.size(); ++other)
      if (streams[waiting] != streams[other]) ops.wait(streams[waiting], events[other]);
}

int64_t norm_tiles(const std::vector<Piece>& pieces) {
  int64_t tiles = 0;
  for (const Piece& piece : pieces) tiles += (piece.count + kNormTile - 1) / kNormTile;
  return tiles;
}

}  // namespace mgpu
