// Rows of uint8 by index -> normalised floats.  A block does one stretch of one row, or several short rows: the loads
// of a thread that are on their way together are of as many rows as have room.  A row out of range becomes NaN, which
// shows in the loss: a kernel has no other way to report it in time.
#pragma once

#include "backends/cuda/kernels/elements.cuh"
#include "core/kernel_calls.h"

namespace mgpu::cuda {

// kWidth elements are loaded and stored together: 4 where rows and outputs allow it, otherwise 1.  Neighbours in a warp
// take neighbours in memory.  Where a block does several rows, `tiles_per_row` is 1.
template <class Out, int kWidth, int kRows>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherRows call, uint32_t tiles_per_row) {
  constexpr int kStretches = kLoadsInFlight / kRows;
  const uint32_t group = kRows > 1 ? blockIdx.x : blockIdx.x / tiles_per_row;
  const int64_t first = int64_t{group} * kRows, tile = blockIdx.x - int64_t{group} * tiles_per_row;
  const auto element = [&](int s) {
    return tile * row_tile(kWidth) + (s * kThreads + static_cast<int64_t>(threadIdx.x)) * kWidth;
  };
  int64_t row[kRows];  // the rows' indices, all on their way before the first row is
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = kRows == 1 || first + r < call.index_count ? call.index[first + r] : -1;
  Vector<uint8_t, kWidth> loaded[kRows][kStretches] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int s = 0; s < kStretches; ++s)
      if (row[r] >= 0 && row[r] < call.rows_count && element(s) < call.row_count)
        loaded[r][s] = load<kWidth>(call.rows + row[r] * call.row_count + element(s));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kRows > 1 && first + r >= call.index_count) return;
    const bool exists = row[r] >= 0 && row[r] < call.rows_count;
    Out* to = static_cast<Out*>(call.out) + (first + r) * call.row_count;
#pragma unroll
    for (int s = 0; s < kStretches; ++s) {
      if (element(s) >= call.row_count) break;
      Vector<Out, kWidth> out;
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        out.at[j] = narrow<Out>(exists ? static_cast<float>(loaded[r][s].at[j]) * call.scale + call.shift : nanf(""));
      store<kWidth>(to + element(s), out);
    }
  }
}

}  // namespace mgpu::cuda
