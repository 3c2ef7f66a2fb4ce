// Which communicator carries which rank of a call.  NCCL sees each GPU once, so the ranks of one device share a
// communicator: the first of them leads, and its stream is the communicator's.
#pragma once

#include <vector>

#include "backends/nccl/team.h"
#include "core/collectives.h"

namespace mgpu::nccl {

struct Places {
  std::vector<size_t> of_rank;             // rank of the call -> place in the team's ranks()
  std::vector<std::vector<size_t>> ranks;  // place -> its ranks of the call, in their order; the first leads
  Streams leading;                         // place -> the leader's stream

  size_t leader(size_t place) const { return ranks[place][0]; }
  // Every rank has a communicator of its own, and they are in the same order.
  bool straight() const;
};

// Throws InvalidArgument where the ranks are not on the team's devices, and BackendUnavailable where they could only be
// carried by summing on a device first, which the call does not want or a part of a team cannot do.
Places places_of(const Team& team, const Ranks& ranks);

// The place whose device the stream is of.  BackendUnavailable: NCCL reaches the devices of its team alone.
size_t place_of_root(const Team& team, const Places& places, Stream root);

// The leaders' streams wait for their ranks' streams, or the other way round.
void before_leaders(DeviceOps& ops, const Places& places, const Streams& streams);
void after_leaders(DeviceOps& ops, const Places& places, const Streams& streams);

// Memory that a call needs until what is on some streams has run.  It comes from staging, host memory that the devices
// write by themselves: slower than their own, but only ranks that share a device need any.
class Scratch {
 public:
  Scratch(DeviceOps& ops, const Streams& streams) : ops_(ops), streams_(streams) {}
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Buffer room(int64_t count, DType dtype);

 private:
  DeviceOps& ops_;
  const Streams streams_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace mgpu::nccl
