#include "backends/cuda/kernels/l2_norm.cuh"
#include "backends/cuda/kernels/tables.cuh"

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
  switch (call.dtype) {
    case DType::f16:
      squares<__half>(call, stream);
      break;
    case DType::bf16:
      squares<__nv_bfloat16>(call, stream);
      break;
    case DType::f64:
      squares<double>(call, stream);
      break;
    default:
      squares<float>(call, stream);
  }
  const int64_t tiles = norm_tiles(call.pieces);
  const double* partials = call.partials;
  if (call.out_dtype == DType::f64)
    start_kernel("root_kernel", root_kernel<double>, 1, stream, partials, tiles, static_cast<double*>(call.out));
  else
    start_kernel("root_kernel", root_kernel<float>, 1, stream, partials, tiles, static_cast<float*>(call.out));
}

}  // namespace mgpu::cuda
