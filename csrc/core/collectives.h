// Door 2: the collectives of a team.  One call drives all ranks: lists in, one entry per rank.
//
// Every buffer of a call has the same dtype and fits the counts in the comment of its function (checked by the
// caller, core/checks.h).  in[r] and out[r] may be the same memory (in place); otherwise no two buffers overlap.
// A room that cannot do an algorithm throws BackendUnavailable before it writes.
#pragma once

#include <vector>

#include "core/types.h"

namespace mgpu {

using Buffers = std::vector<Buffer>;  // one entry per rank

// One sum of a batch: many small tensors go through the team in one call.
struct ReduceCall {
  Buffers in;
  Buffer out;
};
// One source of a batch, and its copies.
struct BroadcastCall {
  Buffer in;
  Buffers out;
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  // out[r] = in[0] op in[1] op ... for every r.
  virtual void all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, Algorithm algorithm) = 0;
  // out = in[0] op in[1] op ..., in rank order.
  virtual void reduce(const std::vector<ReduceCall>& calls, ReduceOp op) = 0;
  virtual void broadcast(const std::vector<BroadcastCall>& calls) = 0;
  // out[r] = in[0] in[1] ... one behind the other; out's count is the sum of in's, which may differ.
  virtual void all_gather(const Buffers& in, const Buffers& out) = 0;
  // out[r] = chunk r of the reduction, in rank order; in's count is ranks times out's.
  virtual void reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op) = 0;
  // What `automatic` means for this call.
  virtual Algorithm choose(int64_t nbytes, int ranks) const = 0;
};

}  // namespace mgpu
