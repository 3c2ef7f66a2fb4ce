#include "backends/cuda/cuda.h"
#include "backends/cuda/guard.h"
#include "backends/cuda/kernels/tables.cuh"
#include "core/dispatch.h"

namespace mgpu::cuda {
namespace {

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

template <class In, class Out>
void cast(const std::vector<Transferred>& all, double scale, cudaStream_t stream) {
  constexpr int kWidth = vector_width(sizeof(In), sizeof(Out));
  std::vector<int64_t> tiles;
  for (const Transferred& each : all) {
    const int head = common_head(address_of(each.to), sizeof(Out), address_of(each.from), sizeof(In));
    tiles.push_back(tiles_of(extent_of(each.count, head, kWidth)));
  }
  const auto start = [&](const auto& table, const Batch& batch) {
    constexpr int kMoves = sizeof(table.moves) / sizeof(Move);
    start_kernel("move_kernel", move_kernel<In, Out, kMoves>, batch.tiles, stream, table, scale);
  };
  for_tables(all, tiles, start, start);
}

template <class In>
void cast_from(const std::vector<Transferred>& all, DType to, double scale, cudaStream_t stream) {
  dispatch_floating<Elements>(to, "a cast", [&](auto out) { cast<In, decltype(out)>(all, scale, stream); });
}

}  // namespace

void launch_cast(const std::vector<Transferred>& all, DType from, DType to, double scale, cudaStream_t stream) {
  dispatch_floating<Elements>(from, "a cast", [&](auto in) { cast_from<decltype(in)>(all, to, scale, stream); });
}

bool has_code_for(int device) {
  const DeviceGuard guard(device);
  cudaFuncAttributes attributes{};
  const cudaError_t code = cudaFuncGetAttributes(&attributes, copy_kernel<kFewMoves>);
  if (code == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

void launch_copy(const std::vector<Transferred>& all, cudaStream_t stream) {
  std::vector<int64_t> tiles;
  for (const Transferred& each : all) {
    const CopyShape shape = copy_shape(address_of(each.to), address_of(each.from));
    tiles.push_back(tiles_of(extent_of(each.count, shape.head, shape.width)));
  }
  const auto start = [&](const auto& table, const Batch& batch) {
    constexpr int kMoves = sizeof(table.moves) / sizeof(Move);
    start_kernel("copy_kernel", copy_kernel<kMoves>, batch.tiles, stream, table);
  };
  for_tables(all, tiles, start, start);
}

}  // namespace mgpu::cuda
