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

template <ReduceOp kOp, class T, int kWidth>
__device__ __forceinline__ void sum_at(const SumTable& table, int64_t i) {
  using Wide = Widened<T>;
  Wide sums[kWidth];
  const auto first = load<kWidth>(static_cast<const T*>(table.in[0]) + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sums[k] = widen<Wide>(first.at[k]);
#pragma unroll 4
  for (int rank = 1; rank < table.in_count; ++rank) {
    const auto next = load<kWidth>(static_cast<const T*>(table.in[rank]) + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[k] = combine<kOp>(sums[k], widen<Wide>(next.at[k]));
  }
  Vector<T, kWidth> result;
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    result.at[k] = narrow<T>(kOp == ReduceOp::avg ? divided(sums[k], table.divisor) : sums[k]);
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

}  // namespace mgpu::cuda
