// Rows of uint8 by index -> normalised floats.  A block does one stretch of one row; a row out of range becomes NaN,
// which shows in the loss: a kernel has no other way to report it in time.
#pragma once

#include "backends/cuda/kernels/elements.cuh"
#include "core/kernel_calls.h"

namespace mgpu::cuda {

// kWidth elements are loaded and stored together: 4 where rows and outputs allow it, otherwise 1.  Neighbours in a warp
// take neighbours in memory.
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

}  // namespace mgpu::cuda
