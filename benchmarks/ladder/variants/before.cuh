// Kernels as they were, to be timed beside those that ship: csrc/backends/cuda/kernels has what each became.
#pragma once

#include "backends/cuda/kernels/gather_rows.cuh"
#include "backends/cuda/kernels/l2_norm.cuh"
#include "backends/cuda/kernels/move.cuh"

namespace mgpu::cuda::before {

// The loads in flight are stretches of one row, of which a short row has one.
template <class Out, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherRows call, int64_t tiles_per_row) {
  const int64_t batch = blockIdx.x / tiles_per_row, stretch = blockIdx.x % tiles_per_row;
  const int64_t row = call.index[batch];
  const bool exists = row >= 0 && row < call.rows_count;
  const uint8_t* from = call.rows + (exists ? row : 0) * call.row_count;
  Out* to = static_cast<Out*>(call.out) + batch * call.row_count;
  const auto element = [&](int k) {
    return stretch * row_tile(kWidth) + (k * kThreads + static_cast<int64_t>(threadIdx.x)) * kWidth;
  };
  Vector<uint8_t, kWidth> loaded[kLoadsInFlight] = {};
#pragma unroll
  for (int k = 0; k < kLoadsInFlight; ++k)
    if (exists && element(k) < call.row_count) loaded[k] = load<kWidth>(from + element(k));
#pragma unroll
  for (int k = 0; k < kLoadsInFlight; ++k) {
    if (element(k) >= call.row_count) return;
    Vector<Out, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      out.at[j] = narrow<Out>(exists ? static_cast<float>(loaded[k].at[j]) * call.scale + call.shift : nanf(""));
    store<kWidth>(to + element(k), out);
  }
}

// Where the first tile of each move alone is known, a block searches for its own: ten reads, one after the other.
constexpr int kMoves = 1024;
struct MoveTable {
  Move moves[kMoves];
  uint32_t first_tile[kMoves];
  int count;
};
// Of float32 on multiples of 16 bytes.
__device__ __forceinline__ void copy_floats(const Move& move, int64_t tile) {
  copy_tile<16>(move, extent_of(move.count, 0, 16), tile);
}
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ MoveTable table) {
  const int index = owner_of(table.first_tile, table.count, blockIdx.x);
  copy_floats(table.moves[index], blockIdx.x - table.first_tile[index]);
}
// All moves in one launch, and the owner of each tile, in memory of the device.
__global__ void __launch_bounds__(kThreads)
    copy_of_a_table_kernel(const Move* moves, const uint32_t* first_tile, const uint16_t* owner) {
  const int index = owner[blockIdx.x];
  copy_floats(moves[index], blockIdx.x - first_tile[index]);
}

// The partial sums of float32, and their sum in a launch of its own.
__global__ void __launch_bounds__(kThreads) squares_kernel(const __grid_constant__ MoveTable table, double* partials) {
  const int index = owner_of(table.first_tile, table.count, blockIdx.x);
  const Move& move = table.moves[index];
  const int64_t begin = (blockIdx.x - table.first_tile[index]) * kNormTile;
  const int64_t count = begin + kNormTile < move.count ? kNormTile : move.count - begin;
  const float* in = static_cast<const float*>(move.from) + begin;
  const uint64_t address = reinterpret_cast<uint64_t>(in);
  const Extent extent = extent_of(count, common_head(address, 4, address, 4), 4);
  PairSum sum;
  add_squares(in, extent, sum);
  double mine = sum.total();
  if (!sum.holds()) {
    DoubleSum wide;
    add_squares(in, extent, wide);
    mine = wide.total();
  }
  const double total = block_sum(mine);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}
__global__ void __launch_bounds__(kThreads) root_kernel(const double* partials, int64_t count, float* out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += partials[i];
  const double total = block_sum(sum);
  if (threadIdx.x == 0) *out = static_cast<float>(sqrt(total));
}

}  // namespace mgpu::cuda::before
