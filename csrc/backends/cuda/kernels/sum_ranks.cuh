// n arrays into m: each element is read once from each input and written once to each output.  Inputs and outputs may
// be other devices' memory in reach.  The inputs are combined in their order, so the bits do not depend on the launch.
#pragma once

#include "backends/cuda/kernels/elements.cuh"
#include "core/types.h"

namespace mgpu::cuda {

constexpr int kMostRanks = 64;  // of one launch, inputs and outputs each

struct SumTable {
  const void* in[kMostRanks];
  void* out[kMostRanks];
  int in_count;
  int out_count;
  int divisor;  // of avg, at the end
  Extent extent;
};

// Integers wrap: they are combined as unsigned.  A NaN on either side wins a minimum or maximum.
template <ReduceOp kOp, class T>
__device__ __forceinline__ T combine(T a, T b) {
  if constexpr (kOp == ReduceOp::prod) {
    if constexpr (std::is_integral_v<T> && sizeof(T) >= 4)
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) * static_cast<std::make_unsigned_t<T>>(b));
    else
      return static_cast<T>(a * b);
  } else if constexpr (kOp == ReduceOp::min) {
    return a < b || a != a ? a : b;
  } else if constexpr (kOp == ReduceOp::max) {
    return a > b || a != a ? a : b;
  } else {
    if constexpr (std::is_integral_v<T> && sizeof(T) >= 4)
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
    else
      return static_cast<T>(a + b);
  }
}

// Integers are cut toward zero.
template <class T>
__device__ __forceinline__ T divided(T sum, int divisor) {
  if constexpr (std::is_integral_v<T> && sizeof(T) < 4)
    return static_cast<T>(static_cast<int>(sum) / divisor);  // of so few bits the divisor may have more
  else
    return sum / static_cast<T>(divisor);
}

// `arrays` has them in a member `in`.
template <ReduceOp kOp, class T, int kWidth, class Arrays>
__device__ __forceinline__ Vector<T, kWidth> sum_of(const Arrays& arrays, int in_count, int divisor, int64_t i) {
  using Wide = Widened<T>;
  Wide sums[kWidth];
  const auto first = load<kWidth>(static_cast<const T*>(arrays.in[0]) + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sums[k] = widen<Wide>(first.at[k]);
#pragma unroll 4
  for (int rank = 1; rank < in_count; ++rank) {
    const auto next = load<kWidth>(static_cast<const T*>(arrays.in[rank]) + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[k] = combine<kOp>(sums[k], widen<Wide>(next.at[k]));
  }
  Vector<T, kWidth> result;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) result.at[k] = narrow<T>(kOp == ReduceOp::avg ? divided(sums[k], divisor) : sums[k]);
  return result;
}

template <ReduceOp kOp, class T, int kWidth>
__device__ __forceinline__ void sum_at(const SumTable& table, int64_t i) {
  const auto result = sum_of<kOp, T, kWidth>(table, table.in_count, table.divisor, i);
  for (int rank = 0; rank < table.out_count; ++rank) store<kWidth>(static_cast<T*>(table.out[rank]) + i, result);
}

template <ReduceOp kOp, class T>
__global__ void __launch_bounds__(kThreads) sum_ranks_kernel(const __grid_constant__ SumTable table) {
  constexpr int kWidth = vector_width(sizeof(T), sizeof(T));
  const auto single = [&](int64_t i) { sum_at<kOp, T, 1>(table, i); };
  if (table.extent.width == 1)
    for_tile<1>(table.extent, blockIdx.x, single, single);
  else
    for_tile<kWidth>(table.extent, blockIdx.x, [&](int64_t i) { sum_at<kOp, T, kWidth>(table, i); }, single);
}

// Many plain sums of as many arrays each, one output each: what becomes of the gradients of a bucket.  The table
// travels in the launch's arguments, and each block does one tile of one sum, as those of move_kernel do.
constexpr int kFewRanks = 8;

struct Sum {
  const void* in[kFewRanks];
  void* out;
  int64_t count;
  int head;  // see common_head
};

template <int kSums>
struct SumsTable {
  Sum sums[kSums];
  uint32_t first_tile[kSums];
  int count;
  int in_count;
};

template <class T, int kWidth>
__device__ __forceinline__ void sum_tile(const Sum& sum, int in_count, const Extent& extent, int64_t tile) {
  T* out = static_cast<T*>(sum.out);
  for_tile<kWidth>(
      extent, tile, [&](int64_t i) { store<kWidth>(out + i, sum_of<ReduceOp::sum, T, kWidth>(sum, in_count, 1, i)); },
      [&](int64_t i) { store<1>(out + i, sum_of<ReduceOp::sum, T, 1>(sum, in_count, 1, i)); });
}

template <class T, int kSums>
__global__ void __launch_bounds__(kThreads) sum_many_kernel(const __grid_constant__ SumsTable<kSums> table) {
  constexpr int kWidth = vector_width(sizeof(T), sizeof(T));
  const int place = owner_of(table.first_tile, table.count, blockIdx.x);
  const Sum& sum = table.sums[place];
  const int64_t tile = blockIdx.x - table.first_tile[place];
  const Extent extent = extent_of(sum.count, sum.head, kWidth);
  if (extent.width == 1)
    sum_tile<T, 1>(sum, table.in_count, extent, tile);
  else
    sum_tile<T, kWidth>(sum, table.in_count, extent, tile);
}

}  // namespace mgpu::cuda
