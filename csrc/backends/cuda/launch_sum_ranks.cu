#include <algorithm>

#include "backends/cuda/kernels/start.cuh"
#include "backends/cuda/kernels/sum_ranks.cuh"
#include "backends/cuda/launch.h"

namespace mgpu::cuda {
namespace {

// Vectors only where every array stands at the same distance from a multiple of 16 bytes.
template <class T>
Extent extent_of_all(const SumRanks& call) {
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const uint64_t first = address(call.in[0]);
  int head = common_head(first, sizeof(T), first, sizeof(T));
  for (const void* in : call.in)
    if ((address(in) - first) % kAlignment != 0) head = -1;
  for (const void* out : call.out)
    if ((address(out) - first) % kAlignment != 0) head = -1;
  return extent_of(call.count, head, vector_width(sizeof(T), sizeof(T)));
}

template <class T>
void start(const SumTable& table, ReduceOp op, cudaStream_t stream) {
  const auto with = [&](auto* kernel) {
    start_kernel("sum_ranks_kernel", kernel, tiles_of(table.extent), stream, table);
  };
  switch (op) {
    case ReduceOp::prod:
      return with(sum_ranks_kernel<ReduceOp::prod, T>);
    case ReduceOp::min:
      return with(sum_ranks_kernel<ReduceOp::min, T>);
    case ReduceOp::max:
      return with(sum_ranks_kernel<ReduceOp::max, T>);
    case ReduceOp::avg:
      if (table.divisor != 1) return with(sum_ranks_kernel<ReduceOp::avg, T>);
      [[fallthrough]];  // a partial sum
    default:
      return with(sum_ranks_kernel<ReduceOp::sum, T>);
  }
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

}  // namespace

void launch_sum_ranks(const SumRanks& call, cudaStream_t stream) {
  require(call.in.size() <= kMostRanks && call.out.size() <= kMostRanks,
          "one launch combines up to " + std::to_string(kMostRanks) + " arrays, not " +
              std::to_string(std::max(call.in.size(), call.out.size())));
  switch (call.dtype) {
    case DType::f16:
      return launch<__half>(call, stream);
    case DType::bf16:
      return launch<__nv_bfloat16>(call, stream);
    case DType::f32:
      return launch<float>(call, stream);
    case DType::f64:
      return launch<double>(call, stream);
    case DType::i32:
      return launch<int32_t>(call, stream);
    case DType::i64:
      return launch<int64_t>(call, stream);
    case DType::u8:
      return launch<uint8_t>(call, stream);
  }
}

}  // namespace mgpu::cuda
