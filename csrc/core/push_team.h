// All-reduces of small arrays by push: one launch a rank, and no event between the ranks (backends/cuda/kernels/
// push_sum.cuh draws how).  The ranks' kernels wait for each other, so all of a call are launched before anybody may
// wait for one, in the launch window and in a turn (launch_order.h), and each waits with a limit.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/collectives.h"
#include "core/device_ops.h"

namespace mgpu {

// Ranks on devices that reach each other, with memory in which they meet.
class PushTeam {
 public:
  // `streams` say which devices; memory[rank], of push_memory_nbytes(ranks) bytes on rank's device, is 0 by now.  After
  // a failure a rank that is late may still write there: whoever owns the memory keeps it.  Throws BackendUnavailable
  // where devices do not reach each other.
  PushTeam(DeviceOps& ops, const Reach& reach, const Streams& streams, std::vector<void*> memory);

  // out[r] = in[0] op in[1] op ... for every r, with the bits of `direct`.  Throws Error, before it starts anything,
  // once a wait of an earlier call was given up, and BackendUnavailable where ranks share a stream, or for a capture.
  void all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, const Streams& streams,
                  std::chrono::nanoseconds limit);
  // Throws Error once a wait was given up, or a launch failed.
  void check() const;

 private:
  void launch(const Buffers& in, const Buffers& out, ReduceOp op, const Streams& streams,
              std::chrono::nanoseconds limit);
  uint64_t* late() const { return static_cast<uint64_t*>(late_.get()); }

  DeviceOps& ops_;
  const std::vector<void*> memory_;
  std::shared_ptr<void> late_;              // a number of each rank, which its kernels write: see PushSum
  uint64_t sequence_ = 0;                   // of the last launch; changed in a turn on all devices
  std::atomic<bool> launch_failed_{false};  // those that were started are told to wait no longer
};

}  // namespace mgpu
