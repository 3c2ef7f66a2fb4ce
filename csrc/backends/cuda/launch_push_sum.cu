#include <algorithm>

#include "backends/cuda/kernels/push_sum.cuh"
#include "backends/cuda/kernels/sum_calls.cuh"
#include "backends/cuda/launch.h"
#include "core/dispatch.h"

namespace mgpu::cuda {
namespace {

static_assert(kPushNbytes <= int64_t{kPushBlocks} * kTileVectors * kAlignment, "a block has one tile at most");

// The memory of one rank.
struct PushMemory {
  char* begin;
  size_t ranks;
  char* slot(const PushSum& call, size_t of) const {
    const auto start = reinterpret_cast<uint64_t>(call.in[of]) % kAlignment;
    return begin + (call.sequence % 2 * ranks + of) * kPushSlotNbytes + start;
  }
  uint64_t* flags(size_t of) const {
    return reinterpret_cast<uint64_t*>(begin + 2 * ranks * kPushSlotNbytes) + of * kPushBlocks;
  }
  uint32_t* given_up() const { return reinterpret_cast<uint32_t*>(flags(ranks)); }
};

template <class T>
PushTable table_of(const PushSum& call) {
  const size_t ranks = call.in.size();
  const PushMemory here{static_cast<char*>(call.memory[call.rank]), ranks};
  PushTable table{};
  for (size_t rank = 0; rank < ranks; ++rank) {
    const PushMemory there{static_cast<char*>(call.memory[rank]), ranks};
    table.in[rank] = rank == call.rank ? call.in[rank] : here.slot(call, rank);
    table.slot[rank] = there.slot(call, call.rank);
    table.flags_at[rank] = there.flags(call.rank);
  }
  table.flags = here.flags(0);
  table.given_up = here.given_up();
  table.late = call.late;
  table.out = call.out[call.rank];
  table.rank = static_cast<int>(call.rank);
  table.ranks = static_cast<int>(ranks);
  table.divisor = call.divisor;
  table.extent = extent_of_all<T>(call);  // of all ranks, so that they cut the same tiles
  table.blocks = static_cast<int>(std::min<int64_t>(tiles_of(table.extent), kPushBlocks));
  table.sequence = call.sequence;
  table.limit_ns = call.limit_ns;
  return table;
}

template <class T>
void start(const PushTable& table, ReduceOp op, cudaStream_t stream) {
  with_op(op,
          [&](auto op) { start_kernel("push_sum_kernel", push_sum_kernel<op.value, T>, table.blocks, stream, table); });
}

}  // namespace

void launch_push_sum(const PushSum& call, cudaStream_t stream) {
  require(call.in.size() <= kMostRanks,
          "one launch combines up to " + std::to_string(kMostRanks) + " arrays, not " + std::to_string(call.in.size()));
  dispatch_dtype<Elements>(call.dtype, "push_sum", [&](auto one) {
    using T = decltype(one);
    start<T>(table_of<T>(call), call.op, stream);
  });
}

}  // namespace mgpu::cuda
