// The checks before a collective, which it may then take for granted.  Each check names what was wanted and what came,
// and which rank.
#pragma once

#include "core/collectives.h"

namespace mgpu {

void check_all_reduce(const Buffers& in, const Buffers& out);
void check_reduce(const std::vector<ReduceCall>& calls);
void check_broadcast(const std::vector<BroadcastCall>& calls);
void check_all_gather(const Buffers& in, const Buffers& out);
void check_reduce_scatter(const Buffers& in, const Buffers& out);

}  // namespace mgpu
