#include "backends/cuda/kernels/l2_norm.cuh"
#include "backends/cuda/kernels/tables.cuh"
#include "core/dispatch.h"

namespace mgpu::cuda {
namespace {

template <class T>
void squares(const L2Norm& call, cudaStream_t stream) {
  std::vector<Transferred> arrays;
  std::vector<int64_t> tiles;
  for (const Piece& piece : call.pieces) {
    arrays.push_back({nullptr, piece.pointer, piece.count});
    tiles.push_back(norm_tiles({piece}));
  }
  double* partials = call.partials;
  const auto start = [&](const auto& table, const Batch& batch) {
    constexpr int kMoves = sizeof(table.first_tile) / sizeof(uint32_t);
    start_kernel("squares_kernel", squares_kernel<T, kMoves>, batch.tiles, stream, table, kNormTile, partials);
    partials += batch.tiles;
  };
  for_tables(arrays, tiles, start, start);
}

}  // namespace

void launch_l2_norm(const L2Norm& call, cudaStream_t stream) {
  const int64_t tiles = norm_tiles(call.pieces);
  const double* partials = call.partials;
  dispatch_floating<Elements>(call.out_dtype, "l2_norm", [&](auto out) {
    using Out = decltype(out);
    if constexpr (std::is_floating_point_v<Out>) {
      dispatch_floating<Elements>(call.dtype, "l2_norm", [&](auto one) { squares<decltype(one)>(call, stream); });
      start_kernel("root_kernel", root_kernel<Out>, 1, stream, partials, tiles, static_cast<Out*>(call.out));
    } else {
      refuse_dtype("the result of l2_norm", call.out_dtype);
    }
  });
}

}  // namespace mgpu::cuda
