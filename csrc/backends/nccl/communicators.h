// Which communicator carries which rank of a call.  NCCL sees each GPU once, so the ranks of one device share a
// communicator: the first of them leads, and its stream is the communicator's.
#pragma once

#include <vector>

#include "backends/nccl/team.h"
#include "core/collectives.h"

namespace mgpu::nccl {

struct Communicators {
  std::vector<size_t> of_rank;             // rank of the call -> index of its communicator in the team's ranks()
  std::vector<std::vector<size_t>> ranks;  // index -> its ranks of the call, in their order; the first leads
  Streams leading;                         // index -> the leader's stream

  size_t leader(size_t index) const { return ranks[index][0]; }
  // Every rank has a communicator of its own, and they are in the same order.
  bool one_per_rank() const;
};

// Throws InvalidArgument where the ranks are not on the team's devices, and BackendUnavailable where they could only be
// carried by summing on a device first, which the call does not want or a part of a team cannot do.
Communicators communicators_of(const Team& team, const Ranks& ranks);

// Returns the index of the communicator on the stream's device.  Throws BackendUnavailable where there is none.
size_t index_of_root(const Team& team, const Communicators& communicators, Stream root);

// The leaders' streams wait for their ranks' streams, or the other way round.
void before_leaders(DeviceOps& ops, const Communicators& communicators, const Streams& streams);
void after_leaders(DeviceOps& ops, const Communicators& communicators, const Streams& streams);

// Memory that a call needs until what is on some streams has run.  It comes from staging, host memory that the devices
// write by themselves: slower than their own, but only ranks that share a device need any.
class Scratch {
 public:
  Scratch(DeviceOps& ops, const Streams& streams) : ops_(ops), streams_(streams) {}
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Buffer allocate(int64_t count, DType dtype);

 private:
  DeviceOps& ops_;
  const Streams streams_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace mgpu::nccl
