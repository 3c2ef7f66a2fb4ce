// Rows of uint8 by index -> normalised floats.  A block does one stretch of one row; a row out of range becomes NaN,
// which whoever looks at the loss will see, because a kernel has no other way to speak in time.
#pragma once

#include "backends/cuda/kernels/elements.cuh"
#include "core/kernel_calls.h"

namespace mgpu::cuda {

constexpr int kRowTile = kThreads * 4;  // elements of a row that one block does

template <class Out>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherRows call, int64_t tiles_per_row) {
  const int64_t batch = blockIdx.x / tiles_per_row, stretch = blockIdx.x % tiles_per_row;
  const int64_t row = call.index[batch];
  const bool there = row >= 0 && row < call.rows_count;
  const uint8_t* from = call.rows + (there ? row : 0) * call.row_count;
  Out* to = static_cast<Out*>(call.out) + batch * call.row_count;
  const int64_t begin = stretch * kRowTile;
  // Neighbours in a warp take neighbours in memory: rows of images have no alignment that four at a time could use.
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int64_t i = begin + k * kThreads + threadIdx.x;
    if (i >= call.row_count) return;
    const float value = there ? static_cast<float>(from[i]) * call.scale + call.shift : nanf("");
    to[i] = narrow<Out>(value);
  }
}

}  // namespace mgpu::cuda
