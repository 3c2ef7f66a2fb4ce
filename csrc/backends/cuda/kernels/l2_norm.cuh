// The sum of squares of many arrays, in a fixed order: every tile of every array has its own partial sum, and the block
// that ends last adds these up.  It is known by a counter; what it adds, and in which order, does not depend on which
// block it is, so the bits are the same in every run.
//
// Most GPUs have one float64 unit for 32 or 64 of float32, so a thread adds up in pairs of float32 (high + low, about
// 44 bits), and float64 begins with the sum of the block.  References: T. J. Dekker, "A floating-point technique for
// extending the available precision" (1971), for the product; D. E. Knuth, TAOCP volume 2, section 4.2.2, for the sum.
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

// A sum of squares as high + low.
struct PairSum {
  float high = 0, low = 0;

  // Adds value * value.  Of half precision the product is exact.
  template <class T>
  __device__ __forceinline__ void add(T value) {
    const float wide = widen<float>(value), square = wide * wide, sum = high + square, added = sum - high;
    low += (high - (sum - added)) + (square - added);
    if constexpr (std::is_same_v<T, float>) low += fmaf(wide, wide, -square);
    high = sum;
  }
  __device__ __forceinline__ double total() const { return static_cast<double>(high) + static_cast<double>(low); }
  // Returns false where squares were too large or too small for float32, or are all zero: then they have to be added up
  // in float64.
  __device__ __forceinline__ bool holds() const { return high >= 0x1p-60f && high <= 0x1p+127f; }
};
struct DoubleSum {
  double sum = 0;

  template <class T>
  __device__ __forceinline__ void add(T value) {
    const double wide = widen<double>(value);
    sum += wide * wide;
  }
  __device__ __forceinline__ double total() const { return sum; }
};

// Adds the squares of a thread's share of an extent at `in`: of four vectors at a time, element by element, so that all
// four loads are on their way before the first is used.
template <class T, class Sum>
__device__ __forceinline__ void add_squares(const T* in, const Extent& extent, Sum& sum) {
  constexpr int kWidth = vector_width(sizeof(T), sizeof(T));
  for (int64_t v = threadIdx.x; v < extent.vectors; v += kLoadsInFlight * kThreads) {
    Vector<T, kWidth> loaded[kLoadsInFlight] = {};  // zeros add nothing
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k)
      if (v + k * kThreads < extent.vectors) loaded[k] = load<kWidth>(in + extent.head + (v + k * kThreads) * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) sum.add(loaded[k].at[j]);
  }
  if (threadIdx.x < extent.head) sum.add(in[threadIdx.x]);
  if (threadIdx.x < extent.tail) sum.add(in[extent.head + extent.vectors * kWidth + threadIdx.x]);
}

// Where the partial sums of all launches meet.
struct NormEnd {
  double* partials;
  int64_t count;      // of them
  uint32_t* counter;  // of the blocks that have ended: 0 before the first launch, and 0 again after the last one
  void* out;
  bool is_double;  // the result
};

// Returns, to all threads of the block, whether every other block of the norm has written its partial sum.
__device__ __forceinline__ bool is_last(const NormEnd& norm) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();  // the partial sum is there before the counter says so
    last = atomicAdd(norm.counter, 1u) == norm.count - 1;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Each thread's sums in the order of the tiles, eight loads on their way together; then the block's.
__device__ __forceinline__ void finish_norm(const NormEnd& norm) {
  constexpr int kTogether = 8;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < norm.count; i += kTogether * kThreads) {
    double some[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) some[k] = i + k * kThreads < norm.count ? norm.partials[i + k * kThreads] : 0;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) sum += some[k];
  }
  const double total = sqrt(block_sum(sum));
  if (threadIdx.x != 0) return;
  if (norm.is_double)
    *static_cast<double*>(norm.out) = total;
  else
    *static_cast<float*>(norm.out) = static_cast<float>(total);
  *norm.counter = 0;
}

// Tile t of the launch, of `tile_count` elements, into partial sum first_partial + t.
template <class T, int kMoves>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const __grid_constant__ MoveTable<kMoves> table, int64_t tile_count, int64_t first_partial,
                   const __grid_constant__ NormEnd norm) {
  const int index = move_of(table, blockIdx.x);
  const Move& move = table.moves[index];
  const int64_t begin = (blockIdx.x - table.first_tile[index]) * tile_count;
  const int64_t count = begin + tile_count < move.count ? tile_count : move.count - begin;
  const T* in = static_cast<const T*>(move.from) + begin;
  const uint64_t address = reinterpret_cast<uint64_t>(in);
  const int head = common_head(address, sizeof(T), address, sizeof(T));
  const Extent extent = extent_of(count, head, vector_width(sizeof(T), sizeof(T)));
  double mine;
  if constexpr (std::is_same_v<T, double>) {
    DoubleSum sum;
    add_squares(in, extent, sum);
    mine = sum.total();
  } else {
    PairSum sum;
    add_squares(in, extent, sum);
    mine = sum.total();
    if (!sum.holds()) {
      DoubleSum wide;
      add_squares(in, extent, wide);
      mine = wide.total();
    }
  }
  const double total = block_sum(mine);
  if (threadIdx.x == 0) norm.partials[first_partial + blockIdx.x] = total;
  if (is_last(norm)) finish_norm(norm);
}

}  // namespace mgpu::cuda
