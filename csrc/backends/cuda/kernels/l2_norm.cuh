// The sum of squares of many arrays, in float64 and in a fixed order: every tile of every array has its own partial
// sum, and one block adds these up at the end.  No atomics, so the bits are the same in every run.
#pragma once

#include "backends/cuda/kernels/move.cuh"

namespace mgpu::cuda {

// The block's sum, in thread 0: halves of a warp by shuffles, then the warps in order.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double of_warp[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0)
    for (double each : of_warp) total += each;
  return total;
}

// Tile t of the launch, of `tile_count` elements, into partials[t].
template <class T, int kMoves>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const __grid_constant__ MoveTable<kMoves> table, int64_t tile_count, double* partials) {
  const int place = owner_of(table.first_tile, table.count, blockIdx.x);
  const Move& move = table.moves[place];
  const int64_t begin = (blockIdx.x - table.first_tile[place]) * tile_count;
  const int64_t end = begin + tile_count < move.count ? begin + tile_count : move.count;
  const T* in = static_cast<const T*>(move.from);
  constexpr int kWidth = vector_width(sizeof(T), sizeof(T));
  const uint64_t address = reinterpret_cast<uint64_t>(in + begin);
  const Extent extent = extent_of(end - begin, common_head(address, sizeof(T), address, sizeof(T)), kWidth);
  double sum = 0;
  const auto add = [&](T value) {
    if constexpr (std::is_same_v<T, __half>) {  // the square of 11 digits is exact in float, and a conversion cheaper
      const float wide = __half2float(value);
      sum += static_cast<double>(wide * wide);
    } else {
      const double wide = widen<double>(value);
      sum += wide * wide;
    }
  };
  if (extent.width == 1) {  // not even on its own size: nothing that torch makes
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) add(in[i]);
  } else {
    for (int64_t v = threadIdx.x; v < extent.vectors; v += kThreads) {
      const auto values = load<kWidth>(in + begin + extent.head + v * kWidth);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) add(values.at[k]);
    }
    if (threadIdx.x < extent.head) add(in[begin + threadIdx.x]);
    if (threadIdx.x < extent.tail) add(in[end - extent.tail + threadIdx.x]);
  }
  const double total = block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// One block.
template <class Out>
__global__ void __launch_bounds__(kThreads) root_kernel(const double* partials, int64_t count, Out* out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += partials[i];
  const double total = block_sum(sum);
  if (threadIdx.x == 0) *out = static_cast<Out>(sqrt(total));
}

}  // namespace mgpu::cuda
