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

// An average of T; integers are cut toward zero, and bytes have wrapped before.
template <class T, class Wide>
__device__ __forceinline__ Wide divided(Wide sum, int divisor) {
  if constexpr (std::is_integral_v<T> && sizeof(T) < 4)
    return static_cast<T>(sum) / static_cast<Wide>(divisor);
  else
    return sum / static_cast<Wide>(divisor);
}

template <class T, int kWidth>
using Sums = Vector<Widened<T>, kWidth>;

template <ReduceOp kOp, class T, int kWidth>
__device__ __forceinline__ void add_to(Sums<T, kWidth>& sums, const Vector<T, kWidth>& next) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sums.at[k] = combine<kOp>(sums.at[k], widen<Widened<T>>(next.at[k]));
}

// Combines the arrays in their order.  `arrays` has them in a member `in`.  kCount is their number where it is known
// when compiled, and then all of them are loaded before the first is used; otherwise it is 0.
template <ReduceOp kOp, class T, int kWidth, int kCount, class Arrays>
__device__ __forceinline__ Vector<T, kWidth> sum_of(const Arrays& arrays, int in_count, int divisor, int64_t i) {
  constexpr int kFirst = kCount > 0 ? kCount : 1;
  const auto next = [&](int rank) { return load<kWidth>(static_cast<const T*>(arrays.in[rank]) + i); };
  Vector<T, kWidth> loaded[kFirst];
#pragma unroll
  for (int rank = 0; rank < kFirst; ++rank) loaded[rank] = next(rank);
  Sums<T, kWidth> sums;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sums.at[k] = widen<Widened<T>>(loaded[0].at[k]);
#pragma unroll
  for (int rank = 1; rank < kFirst; ++rank) add_to<kOp, T>(sums, loaded[rank]);
  if constexpr (kCount == 0)
#pragma unroll 4
    for (int rank = 1; rank < in_count; ++rank) add_to<kOp, T>(sums, next(rank));
  Vector<T, kWidth> result;
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    result.at[k] = narrow<T>(kOp == ReduceOp::avg ? divided<T>(sums.at[k], divisor) : sums.at[k]);
  return result;
}

// Sums a tile of arrays, and hands each result to `store`.
template <ReduceOp kOp, class T, int kWidth, int kCount, class Arrays, class Store>
__device__ __forceinline__ void sum_tile_of(const Arrays& arrays, int in_count, int divisor, const Extent& extent,
                                            int64_t tile, Store&& store) {
  constexpr int kTogether = kCount == 0 || kWidth == 1 ? 1 : together(kAlignment * kCount);
  for_tile<kWidth, kTogether>(
      extent, tile, [&](int64_t i) { return sum_of<kOp, T, kWidth, kCount>(arrays, in_count, divisor, i); }, store,
      [&](int64_t i) { store(i, sum_of<kOp, T, 1, 0>(arrays, in_count, divisor, i)); });
}

// Sums of the usual numbers of ranks have code of their own, in which all loads of a vector are on their way at once.
template <ReduceOp kOp, class T, class Arrays, class Store>
__device__ __forceinline__ void sum_tile(const Arrays& arrays, int in_count, int divisor, const Extent& extent,
                                         int64_t tile, Store&& store) {
  constexpr int kWidth = vector_width(sizeof(T), sizeof(T));
  if (extent.width == 1) return sum_tile_of<kOp, T, 1, 0>(arrays, in_count, divisor, extent, tile, store);
  if constexpr (kOp == ReduceOp::sum || (kOp == ReduceOp::avg && !std::is_integral_v<T>)) {
    if (in_count == 2) return sum_tile_of<kOp, T, kWidth, 2>(arrays, in_count, divisor, extent, tile, store);
    if (in_count == 4) return sum_tile_of<kOp, T, kWidth, 4>(arrays, in_count, divisor, extent, tile, store);
    if (in_count == 8 && sizeof(T) > 1)  // sixteen accumulators leave no registers for the loads of eight ranks
      return sum_tile_of<kOp, T, kWidth, 8>(arrays, in_count, divisor, extent, tile, store);
  }
  return sum_tile_of<kOp, T, kWidth, 0>(arrays, in_count, divisor, extent, tile, store);
}

// One block for a multiprocessor is enough for the compiler: asked for more, it spills the loads of eight ranks.
template <ReduceOp kOp, class T>
__global__ void __launch_bounds__(kThreads, 1) sum_ranks_kernel(const __grid_constant__ SumTable table) {
  sum_tile<kOp, T>(table, table.in_count, table.divisor, table.extent, blockIdx.x, [&](int64_t i, const auto& sum) {
    constexpr int kWidth = sizeof(sum.at) / sizeof(T);
#pragma unroll 4
    for (int rank = 0; rank < table.out_count; ++rank) store<kWidth>(static_cast<T*>(table.out[rank]) + i, sum);
  });
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

template <class T, int kSums>
__global__ void __launch_bounds__(kThreads, 1) sum_many_kernel(const __grid_constant__ SumsTable<kSums> table) {
  const int index = owner_of(table.first_tile, table.count, blockIdx.x);
  const Sum& sum = table.sums[index];
  const int64_t tile = blockIdx.x - table.first_tile[index];
  const Extent extent = extent_of(sum.count, sum.head, vector_width(sizeof(T), sizeof(T)));
  sum_tile<ReduceOp::sum, T>(sum, table.in_count, 1, extent, tile, [&](int64_t i, const auto& result) {
    store<sizeof(result.at) / sizeof(T)>(static_cast<T*>(sum.out) + i, result);
  });
}

}  // namespace mgpu::cuda
