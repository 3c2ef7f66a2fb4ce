// The collectives of a team.  One call drives all ranks: lists in, one entry per rank.
//
// Every buffer of a call has the same dtype and fits the counts in the comment of its function (checked by the
// caller, core/checks.h).  in[r] and out[r] may be the same memory (in place); otherwise no two buffers overlap.
//
// Order: a call comes after all that is on its ranks' streams, and what is put on rank r's stream afterwards finds
// out[r] written and may write in[r] and out[r].  A backend that cannot do an algorithm throws BackendUnavailable
// before it writes.
#pragma once

#include <vector>

#include "core/device_ops.h"
#include "core/types.h"

namespace mgpu {

using Buffers = std::vector<Buffer>;  // one entry per rank

// One sum of a batch: many small tensors go through the team in one call.
struct ReduceCall {
  Buffers in;  // a rank without memory (a null pointer) has nothing to add
  Buffer out;
};
// One source of a batch, and its copies.
struct BroadcastCall {
  Buffer in;
  Buffers out;
};

// The streams of the ranks, and whether ranks on one device are summed there first where the order is free (ring,
// nccl).  naive and direct always add in rank order.
struct Ranks {
  Streams streams;
  bool merge_shared_devices = true;
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  // out[r] = in[0] op in[1] op ... for every r.
  virtual void all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, Algorithm algorithm,
                          const Ranks& ranks) = 0;
  // out = in[0] op in[1] op ..., in rank order, on `root`.
  virtual void reduce(const std::vector<ReduceCall>& calls, ReduceOp op, const Ranks& ranks, Stream root) = 0;
  // From memory of `root`.  A copy that is the source itself is left alone.
  virtual void broadcast(const std::vector<BroadcastCall>& calls, Stream root, const Ranks& ranks) = 0;
  // out[r] = in[0] in[1] ... one after the other; out's count is the sum of in's, which may differ.
  virtual void all_gather(const Buffers& in, const Buffers& out, const Ranks& ranks) = 0;
  // out[r] = chunk r of the reduction, in rank order; in's count is ranks times out's.  Not in place.
  virtual void reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op, const Ranks& ranks) = 0;
};

}  // namespace mgpu
