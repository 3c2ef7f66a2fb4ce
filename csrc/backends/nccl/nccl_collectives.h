// Collectives by NCCL.  Each GPU has one communicator: what its ranks have is combined there first, in rank order, and
// what comes back is copied to them.  Between the GPUs the order of the sum is NCCL's.
//
// A team may have ranks in other processes: then the lists of a call have one entry per rank of this process, and the
// others make the same call.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/communicators.h"
#include "backends/nccl/team.h"
#include "core/collectives.h"

namespace mgpu::nccl {

// One message of an exchange, seen from one end.
struct Message {
  int rank;  // of the call: whose memory it is
  int peer;  // of the team (where all of it is in this process: of the call)
  Buffer buffer;
};
using Messages = std::vector<Message>;

class NcclCollectives final : public Collectives {
 public:
  explicit NcclCollectives(std::shared_ptr<Team> team) : team_(std::move(team)), ops_(team_->ops()) {}

  void all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, Algorithm algorithm, const Ranks& ranks) override;
  // BackendUnavailable where no rank of some device has anything to add: NCCL needs a part from each.
  void reduce(const std::vector<ReduceCall>& calls, ReduceOp op, const Ranks& ranks, Stream root) override;
  void broadcast(const std::vector<BroadcastCall>& calls, Stream root, const Ranks& ranks) override;
  void all_gather(const Buffers& in, const Buffers& out, const Ranks& ranks) override;
  void reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op, const Ranks& ranks) override;

  // The same where the root may be in another process: `root` is a rank of the team.  `out` is used in the root's
  // process alone.
  void reduce_to(int root, const Buffers& in, const Buffer& out, ReduceOp op, const Streams& streams);
  void broadcast_from(int root, const Buffers& inout, const Streams& streams);

  // All at once; messages between the same two ranks arrive in the order in which they are listed.
  void exchange(const Messages& sends, const Messages& receives, const Streams& streams);

 private:
  // What a reduction asks of NCCL, and what is left to do on the results.
  struct Reduction {
    int op;
    int divisor;  // 1: nothing is left to do
  };
  struct Root {
    int rank;   // of the team
    int index;  // -1: in another process
  };
  Reduction reduction_of(ReduceOp op, DType dtype, size_t parts) const;
  void divide(const Buffer& buffer, const Reduction& reduction, Stream on);

  void all_reduce_each(const Buffers& in, const Buffers& out, ReduceOp op, size_t parts, const Streams& streams);
  Buffer combined(const Buffers& in, const std::vector<size_t>& members, ReduceOp op, Stream on, const Buffer* into,
                  Scratch& scratch);
  void reduce_at(const std::vector<ReduceCall>& calls, ReduceOp op, const Communicators& communicators, Root root);
  void broadcast_at(const std::vector<BroadcastCall>& calls, const Communicators& communicators, const Streams& streams,
                    Root root);
  void copy_to_members(const std::vector<BroadcastCall>& calls, const Communicators& communicators,
                       const Streams& streams);
  void gather_by_broadcasts(const Buffers& in, const Buffers& out, const Communicators& communicators,
                            const Streams& streams);
  void scatter_by_reductions(const Buffers& in, const Buffers& out, ReduceOp op, const Communicators& communicators);

  int number_of(size_t index) const { return team_->ranks()[index].rank; }
  Root root_of(int rank) const;

  const std::shared_ptr<Team> team_;
  DeviceOps& ops_;
};

// For messages: "ncclAllReduce(count 7, float32, sum)".
std::string call_text(const char* name, int64_t count, DType dtype, const std::string& more = "");

}  // namespace mgpu::nccl
