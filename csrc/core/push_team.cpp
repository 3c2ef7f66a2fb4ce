#include "core/push_team.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/buffers.h"
#include "core/error.h"
#include "core/launch_order.h"
#include "core/launch_window.h"

namespace mgpu {
namespace {

constexpr uint64_t kInVain = UINT64_MAX;  // ends the waits of a launch that failed on some rank

void require_own_streams(DeviceOps& ops, const Streams& streams) {
  if (distinct(streams).size() < streams.size())
    throw BackendUnavailable("push needs a stream for each rank: its ranks wait for each other");
  for (const Stream& stream : streams)
    if (ops.is_captured(stream)) throw BackendUnavailable("push cannot be captured in a graph: call it between graphs");
}

}  // namespace

PushTeam::PushTeam(DeviceOps& ops, const Reach& reach, const Streams& streams, std::vector<void*> memory)
    : ops_(ops), memory_(std::move(memory)) {
  require(!streams.empty() && memory_.size() == streams.size(), "memory must have one entry per rank, and some");
  if (streams[0].on_host() || !in_reach(reach, streams))
    throw BackendUnavailable("push works between GPUs that reach each other's memory");
  const size_t nbytes = streams.size() * sizeof(uint64_t);
  late_ = ops_.staging(static_cast<int64_t>(nbytes), streams);
  std::memset(late_.get(), 0, nbytes);
}

void PushTeam::check() const {
  if (launch_failed_) throw Error("an earlier all-reduce by push could not be started on all of its GPUs");
  const volatile uint64_t* late_ranks = late();
  for (size_t rank = 0; rank < memory_.size(); ++rank)
    if (const uint64_t seen = late_ranks[rank])
      throw Error("rank " + std::to_string(rank) + " gave up an all-reduce by push: rank " + std::to_string(seen - 1) +
                  " did not come to it within the limit.  Its floating results are NaN");
}

void PushTeam::all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, const Streams& streams,
                          std::chrono::nanoseconds limit) {
  require(streams.size() == memory_.size() && in.size() == memory_.size(),
          "one buffer and stream per rank of the team");
  require_own_streams(ops_, streams);
  const int64_t step = kPushNbytes / static_cast<int64_t>(itemsize(in[0].dtype));
  LaunchTurn turn(ops_, streams, Clock::now() + limit);
  check();
  InLaunchWindow window(launch_window(), std::defer_lock);
  window.try_lock_for(kWindowLimit);
  for (int64_t begin = 0; begin < in[0].count; begin += step) {
    const Chunk chunk{begin, std::min(step, in[0].count - begin)};
    launch(slices(in, chunk), slices(out, chunk), op, streams, limit);
  }
  turn.launched();
}

void PushTeam::launch(const Buffers& in, const Buffers& out, ReduceOp op, const Streams& streams,
                      std::chrono::nanoseconds limit) try {
  const SumRanks sum = sum_of(in, out, op, divisor_of(op, in.size()));
  PushSum call{sum.in, sum.out, memory_, 0, sum.count, sum.dtype, op, sum.divisor, ++sequence_, limit.count(), nullptr};
  for (call.rank = 0; call.rank < streams.size(); ++call.rank) {
    call.late = late() + call.rank;
    ops_.push_sum(call, streams[call.rank]);
  }
} catch (const std::exception&) {
  launch_failed_ = true;
  for (size_t rank = 0; rank < memory_.size(); ++rank) static_cast<volatile uint64_t*>(late())[rank] = kInVain;
  throw;
}

}  // namespace mgpu
