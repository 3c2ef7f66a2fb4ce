#include "core/merged.h"

#include "core/buffers.h"

namespace mgpu {
namespace {

using Members = std::vector<std::vector<size_t>>;  // ranks of each device; the first leads

// Ranks in host memory count as devices of their own: they show what several devices would do.
bool on_one_device(Stream one, Stream other) { return one.same_device(other) && !one.on_host(); }

Members members_of(const Streams& streams) {
  Members members;
  for (size_t rank = 0; rank < streams.size(); ++rank) {
    bool found = false;
    for (auto& ranks : members)
      if (!found && on_one_device(streams[ranks[0]], streams[rank])) {
        ranks.push_back(rank);
        found = true;
      }
    if (!found) members.push_back({rank});
  }
  return members;
}

// The leader's stream waits for its members, then adds their inputs into its own output.
void sum_members(DeviceOps& ops, const std::vector<size_t>& ranks, const Buffers& in, const Buffers& out, ReduceOp op,
                 const Streams& streams) {
  const size_t leader = ranks[0];
  if (ranks.size() == 1 && in[leader].pointer == out[leader].pointer) return;
  Buffers parts;
  for (size_t rank : ranks) {
    order(ops, streams[rank], streams[leader]);
    parts.push_back(in[rank]);
  }
  ops.sum_ranks({sum_of(parts, {out[leader]}, op, 1)}, streams[leader]);
}

// Each member copies its leader's result; the leader may overwrite it only when they have.
void copy_to_members(DeviceOps& ops, const std::vector<size_t>& ranks, const Buffers& out, const Streams& streams) {
  const size_t leader = ranks[0];
  for (size_t i = 1; i < ranks.size(); ++i) {
    const Stream stream = streams[ranks[i]];
    order(ops, streams[leader], stream);
    ops.copy({plain_copy(out[ranks[i]].pointer, out[leader].pointer, nbytes_of(out[leader]))}, stream);
    order(ops, stream, streams[leader]);
  }
}

}  // namespace

bool share_devices(const Streams& streams) { return members_of(streams).size() < streams.size(); }

void merged_all_reduce(DeviceOps& ops, const Buffers& in, const Buffers& out, ReduceOp op, const Streams& streams,
                       const AmongDevices& among) {
  const Members members = members_of(streams);
  Buffers leaders;
  Streams leading;
  for (const auto& ranks : members) {
    sum_members(ops, ranks, in, out, op, streams);
    leaders.push_back(out[ranks[0]]);
    leading.push_back(streams[ranks[0]]);
  }
  among(leaders, leading);
  for (const auto& ranks : members) copy_to_members(ops, ranks, out, streams);
}

}  // namespace mgpu
