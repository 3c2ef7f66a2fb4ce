#include "backends/cuda/kernels/gather_rows.cuh"
#include "backends/cuda/kernels/start.cuh"
#include "backends/cuda/launch.h"
#include "core/dispatch.h"

namespace mgpu::cuda {

namespace {

template <class Out, int kWidth, int kRows>
void start(const GatherRows& call, cudaStream_t stream) {
  const int64_t tiles_per_row = (call.row_count + row_tile(kWidth) - 1) / row_tile(kWidth);
  const int64_t tiles = (call.index_count + kRows - 1) / kRows * tiles_per_row;
  require(tiles <= kMostBlocks, "gather_rows: " + std::to_string(tiles) + " blocks, more than a grid has");
  start_kernel("gather_rows_kernel", gather_rows_kernel<Out, kWidth, kRows>, tiles, stream, call,
               static_cast<uint32_t>(tiles_per_row));
}

template <class Out, int kWidth>
void start(const GatherRows& call, cudaStream_t stream) {
  switch (rows_of_block(call.row_count, kWidth)) {
    case 4:
      return start<Out, kWidth, 4>(call, stream);
    case 2:
      return start<Out, kWidth, 2>(call, stream);
    default:
      return start<Out, kWidth, 1>(call, stream);
  }
}

template <class Out>
void launch(const GatherRows& call, cudaStream_t stream) {
  const auto is_on = [](const void* pointer, uint64_t multiple) {
    return reinterpret_cast<uint64_t>(pointer) % multiple == 0;
  };
  const bool by_four = call.row_count % 4 == 0 && is_on(call.rows, 4) && is_on(call.out, 4 * sizeof(Out));
  by_four ? start<Out, 4>(call, stream) : start<Out, 1>(call, stream);
}

}  // namespace

void launch_gather_rows(const GatherRows& call, cudaStream_t stream) {
  dispatch_floating<Elements>(call.out_dtype, "gather_rows", [&](auto out) {
    if constexpr (std::is_same_v<decltype(out), double>)
      refuse_dtype("gather_rows", call.out_dtype);
    else
      launch<decltype(out)>(call, stream);
  });
}

}  // namespace mgpu::cuda
