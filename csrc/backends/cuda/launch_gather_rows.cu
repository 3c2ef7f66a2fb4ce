#include "backends/cuda/kernels/gather_rows.cuh"
#include "backends/cuda/kernels/start.cuh"
#include "backends/cuda/launch.h"

namespace mgpu::cuda {

void launch_gather_rows(const GatherRows& call, cudaStream_t stream) {
  const int64_t tiles_per_row = (call.row_count + kRowTile - 1) / kRowTile, tiles = tiles_per_row * call.index_count;
  require(tiles <= 2147483647, "gather_rows: " + std::to_string(tiles) + " blocks, more than a grid has");
  const auto start = [&](auto* kernel) {
    start_kernel("gather_rows_kernel", kernel, tiles, stream, call, tiles_per_row);
  };
  switch (call.out_dtype) {
    case DType::f16:
      return start(gather_rows_kernel<__half>);
    case DType::bf16:
      return start(gather_rows_kernel<__nv_bfloat16>);
    default:
      return start(gather_rows_kernel<float>);
  }
}

}  // namespace mgpu::cuda
