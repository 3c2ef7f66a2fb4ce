// Collectives over DeviceOps: one host drives all ranks, whose memory is in reach of each other's devices.  No kernel
// waits for another device; every order between streams is an event.  The cpu backend and the cuda backend share this
// file, and so do the fakes of the tests.
//
// Devices that do not reach each other exchange data through host memory: each rank copies its input there, and the
// others read the copy (host_staging.h).  Large tensors go in pieces.
#pragma once

#include "core/pieces.h"

namespace mgpu {

class PeerCollectives final : public Collectives {
 public:
  // `piece_nbytes` limits the staging memory of one piece of a call.
  PeerCollectives(DeviceOps& ops, Reach reach, int64_t piece_nbytes = kPieceNbytes)
      : ops_(ops), reach_(std::move(reach)), piece_nbytes_(piece_nbytes) {}

  void all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, Algorithm algorithm, const Ranks& ranks) override;
  void reduce(const std::vector<ReduceCall>& calls, ReduceOp op, const Ranks& ranks, Stream root) override;
  void broadcast(const std::vector<BroadcastCall>& calls, Stream root, const Ranks& ranks) override;
  void all_gather(const Buffers& in, const Buffers& out, const Ranks& ranks) override;
  void reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op, const Ranks& ranks) override;

 private:
  DeviceOps& ops_;
  Reach reach_;
  const int64_t piece_nbytes_;
};

}  // namespace mgpu
