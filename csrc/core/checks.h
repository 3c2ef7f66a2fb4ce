// Checks of a collective's buffers, made before the call; collectives rely on them.  A message names the rank, what was
// expected and what was given.
#pragma once

#include "core/collectives.h"

namespace mgpu {

void check_all_reduce(const Buffers& in, const Buffers& out);
void check_reduce(const std::vector<ReduceCall>& calls);
void check_broadcast(const std::vector<BroadcastCall>& calls);
void check_all_gather(const Buffers& in, const Buffers& out);
void check_reduce_scatter(const Buffers& in, const Buffers& out);

}  // namespace mgpu
