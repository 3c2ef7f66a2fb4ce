// pack, unpack, scale_cast and batches of copies are one kernel: many arrays to many others, each scaled and cast.
//
// The table of arrays travels in the launch's arguments, so there is no memory to allocate for it, nothing to wait for,
// and a captured graph keeps it.  Each block does one tile of one array, and finds out which by binary search.
#pragma once

#include "backends/cuda/kernels/elements.cuh"

namespace mgpu::cuda {

struct Move {
  void* to;
  const void* from;
  int64_t count;
};

// For so many moves in one launch: 28 bytes each, below the limit of all arguments together.
template <int kMoves>
struct MoveTable {
  Move moves[kMoves];
  uint32_t first_tile[kMoves];
  int count;
};

template <class In, class Out, int kWidth, class Wide>
__device__ __forceinline__ void move_tile(const Move& move, const Extent& extent, int64_t tile, Wide scale) {
  const In* from = static_cast<const In*>(move.from);
  Out* to = static_cast<Out*>(move.to);
  const auto cast = [scale](In value) { return narrow<Out>(widen<Wide>(value) * scale); };
  for_tile<kWidth>(
      extent, tile,
      [&](int64_t i) {
        const auto in = load<kWidth>(from + i);
        Vector<Out, kWidth> out;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) out.at[k] = cast(in.at[k]);
        store<kWidth>(to + i, out);
      },
      [&](int64_t i) { to[i] = cast(from[i]); });
}

template <class In, class Out, int kMoves>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveTable<kMoves> table, double scale) {
  using Wide = Common<In, Out>;
  constexpr int kWidth = vector_width(sizeof(In), sizeof(Out));
  const int place = owner_of(table.first_tile, table.count, blockIdx.x);
  const Move& move = table.moves[place];
  const int64_t tile = blockIdx.x - table.first_tile[place];
  const int head =
      common_head(reinterpret_cast<uint64_t>(move.to), sizeof(Out), reinterpret_cast<uint64_t>(move.from), sizeof(In));
  const Extent extent = extent_of(move.count, head, kWidth);
  if (extent.width == 1)
    move_tile<In, Out, 1>(move, extent, tile, static_cast<Wide>(scale));
  else
    move_tile<In, Out, kWidth>(move, extent, tile, static_cast<Wide>(scale));
}

// The same for bytes as they are: a whole tile's loads are all on their way before the first store waits for one.
template <int kWidth>
__device__ __forceinline__ void copy_tile(const Move& move, const Extent& extent, int64_t tile) {
  const uint8_t* from = static_cast<const uint8_t*>(move.from);
  uint8_t* to = static_cast<uint8_t*>(move.to);
  const int64_t first = tile * kTileVectors + threadIdx.x;
  if (first - threadIdx.x + kTileVectors <= extent.vectors) {
    Vector<uint8_t, kWidth> loaded[kVectorsPerThread];
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k)
      loaded[k] = load<kWidth>(from + extent.head + (first + k * kThreads) * kWidth);
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k)
      store<kWidth>(to + extent.head + (first + k * kThreads) * kWidth, loaded[k]);
    if (tile != 0) return;
    const int64_t behind = extent.head + extent.vectors * kWidth;
    if (threadIdx.x < extent.head) to[threadIdx.x] = from[threadIdx.x];
    if (threadIdx.x < extent.tail) to[behind + threadIdx.x] = from[behind + threadIdx.x];
    return;
  }
  for_tile<kWidth>(
      extent, tile, [&](int64_t i) { store<kWidth>(to + i, load<kWidth>(from + i)); },
      [&](int64_t i) { to[i] = from[i]; });
}

// Counts are bytes.
template <int kMoves>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ MoveTable<kMoves> table) {
  const int place = owner_of(table.first_tile, table.count, blockIdx.x);
  const Move& move = table.moves[place];
  const int64_t tile = blockIdx.x - table.first_tile[place];
  const CopyShape shape = copy_shape(reinterpret_cast<uint64_t>(move.to), reinterpret_cast<uint64_t>(move.from));
  const Extent extent = extent_of(move.count, shape.head, shape.width);
  switch (shape.width) {
    case 16:
      return copy_tile<16>(move, extent, tile);
    case 8:
      return copy_tile<8>(move, extent, tile);
    case 4:
      return copy_tile<4>(move, extent, tile);
    case 2:
      return copy_tile<2>(move, extent, tile);
    default:
      return copy_tile<1>(move, extent, tile);
  }
}

}  // namespace mgpu::cuda
