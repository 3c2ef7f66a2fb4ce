#include <numeric>

#include "backends/cuda/kernels/l2_norm.cuh"
#include "backends/cuda/kernels/tables.cuh"
#include "core/dispatch.h"

namespace mgpu::cuda {
namespace {

template <class T>
void launch(const L2Norm& call, bool is_double, cudaStream_t stream) {
  std::vector<Transferred> arrays;
  std::vector<int64_t> tiles;
  for (const Piece& piece : call.pieces) {
    arrays.push_back({nullptr, piece.pointer, piece.count});
    tiles.push_back(norm_tiles({piece}));
  }
  if (arrays.empty()) {  // one block writes the norm of nothing
    arrays.push_back({nullptr, nullptr, 0});
    tiles.push_back(1);
  }
  const int64_t count = std::accumulate(tiles.begin(), tiles.end(), int64_t{0});
  const NormEnd norm{call.partials, count, reinterpret_cast<uint32_t*>(call.partials + count), call.out, is_double};
  int64_t first_partial = 0;
  const auto start = [&](const auto& table, const Batch& batch) {
    constexpr int kMoves = sizeof(table.moves) / sizeof(Move);
    start_kernel("squares_kernel", squares_kernel<T, kMoves>, batch.tiles, stream, table, kNormTile, first_partial,
                 norm);
    first_partial += batch.tiles;
  };
  for_tables(arrays, tiles, start, start);
}

}  // namespace

void launch_l2_norm(const L2Norm& call, cudaStream_t stream) {
  if (call.out_dtype != DType::f32 && call.out_dtype != DType::f64)
    refuse_dtype("the result of l2_norm", call.out_dtype);
  dispatch_floating<Elements>(call.dtype, "l2_norm",
                              [&](auto one) { launch<decltype(one)>(call, call.out_dtype == DType::f64, stream); });
}

}  // namespace mgpu::cuda
