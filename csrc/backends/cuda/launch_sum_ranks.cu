#include <algorithm>

#include "backends/cuda/kernels/sum_calls.cuh"
#include "backends/cuda/kernels/sum_ranks.cuh"
#include "backends/cuda/kernels/tables.cuh"
#include "backends/cuda/launch.h"
#include "core/dispatch.h"

namespace mgpu::cuda {
namespace {

constexpr int kFewSums = 40, kManySums = 340;  // within 4 and 32 KiB

template <class T>
void start(const SumTable& table, ReduceOp op, cudaStream_t stream) {
  const bool is_partial = op == ReduceOp::avg && table.divisor == 1;
  with_op(is_partial ? ReduceOp::sum : op, [&](auto op) {
    start_kernel("sum_ranks_kernel", sum_ranks_kernel<op.value, T>, tiles_of(table.extent), stream, table);
  });
}

template <class T>
void launch(const SumRanks& call, cudaStream_t stream) {
  SumTable table{{},
                 {},
                 static_cast<int>(call.in.size()),
                 static_cast<int>(call.out.size()),
                 call.divisor,
                 extent_of_all<T>(call)};
  for (size_t rank = 0; rank < call.in.size(); ++rank) table.in[rank] = call.in[rank];
  for (size_t rank = 0; rank < call.out.size(); ++rank) table.out[rank] = call.out[rank];
  start<T>(table, call.op, stream);
}

template <class T, int kSums>
void start_many(const std::vector<const SumRanks*>& calls, const std::vector<int64_t>& tiles, const Batch& batch,
                cudaStream_t stream) {
  SumsTable<kSums> table;
  table.count = static_cast<int>(batch.count);
  table.in_count = static_cast<int>(calls[0]->in.size());
  uint32_t first = 0;
  for (int i = 0; i < table.count; ++i) {
    const SumRanks& call = *calls[static_cast<size_t>(batch.begin + i)];
    Sum& sum = table.sums[i] = {{}, call.out[0], call.count, head_of_all<T>(call)};
    std::copy(call.in.begin(), call.in.end(), sum.in);
    table.first_tile[i] = first;
    first += static_cast<uint32_t>(tiles[static_cast<size_t>(batch.begin + i)]);
  }
  start_kernel("sum_many_kernel", sum_many_kernel<T, kSums>, batch.tiles, stream, table);
}

template <class T>
void launch_many(const std::vector<const SumRanks*>& calls, cudaStream_t stream) {
  std::vector<int64_t> tiles;
  for (const SumRanks* call : calls) tiles.push_back(tiles_of(extent_of_all<T>(*call)));
  const int most = most_moves() == kManyMoves ? kManySums : kFewSums;
  for (const Batch& batch : batches_of(tiles, most, kMostBlocks)) {
    if (batch.count <= kFewSums)
      start_many<T, kFewSums>(calls, tiles, batch, stream);
    else
      start_many<T, kManySums>(calls, tiles, batch, stream);
  }
}

}  // namespace

bool fits_a_table(const SumRanks& call) {
  return call.out.size() == 1 && call.in.size() <= kFewRanks && call.divisor == 1 &&
         (call.op == ReduceOp::sum || call.op == ReduceOp::avg);
}

void launch_sums(const std::vector<const SumRanks*>& calls, cudaStream_t stream) {
  dispatch_dtype<Elements>(calls[0]->dtype, "sum_ranks", [&](auto one) { launch_many<decltype(one)>(calls, stream); });
}

void launch_sum_ranks(const SumRanks& call, cudaStream_t stream) {
  require(call.in.size() <= kMostRanks && call.out.size() <= kMostRanks,
          "one launch combines up to " + std::to_string(kMostRanks) + " arrays, not " +
              std::to_string(std::max(call.in.size(), call.out.size())));
  dispatch_dtype<Elements>(call.dtype, "sum_ranks", [&](auto one) { launch<decltype(one)>(call, stream); });
}

}  // namespace mgpu::cuda
