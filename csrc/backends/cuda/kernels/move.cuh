// pack, unpack, scale_cast and batches of copies are one kernel: many arrays to many others, each scaled and cast.
//
// The table of arrays travels in the launch's arguments, so there is no memory to allocate for it, nothing to wait for,
// and a captured graph keeps it.  Each block does one tile of one array; the table says of which.
#pragma once

#include "backends/cuda/kernels/elements.cuh"

namespace mgpu::cuda {

struct Move {
  void* to;
  const void* from;
  int64_t count;
};

// For so many moves in one launch: 28 bytes each, and what is left below the limit of all arguments together for the
// owners of tiles.
constexpr int kFewMoves = 128, kManyMoves = 960;
template <int kMoves>
struct MoveTable {
  static constexpr int kOwners = kMoves == kFewMoves ? 216 : 2880;
  Move moves[kMoves];
  uint32_t first_tile[kMoves];
  int count;
  int shift;                // owner[i] is the move of tile i << shift; 0 where there are few tiles
  uint16_t owner[kOwners];  // then one more, the last move
};

// Returns the move that a tile belongs to: in one read where the table names each tile's, because a block begins with
// it and every read waits for the one before.
template <int kMoves>
MGPU_HOST_DEVICE inline int move_of(const MoveTable<kMoves>& table, uint32_t tile) {
  const uint32_t at = tile >> table.shift;
  const int low = table.owner[at];
  if (table.shift == 0) return low;
  return low + owner_of(table.first_tile + low, table.owner[at + 1] - low + 1, tile);
}

template <class In, class Out, int kWidth, class Wide>
__device__ __forceinline__ void move_tile(const Move& move, const Extent& extent, int64_t tile, Wide scale) {
  const In* from = static_cast<const In*>(move.from);
  Out* to = static_cast<Out*>(move.to);
  const auto cast = [scale](In value) { return narrow<Out>(widen<Wide>(value) * scale); };
  for_tile<kWidth, together(sizeof(In) * kWidth)>(
      extent, tile, [&](int64_t i) { return load<kWidth>(from + i); },
      [&](int64_t i, const Vector<In, kWidth>& in) {
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
  const int index = move_of(table, blockIdx.x);
  const Move& move = table.moves[index];
  const int64_t tile = blockIdx.x - table.first_tile[index];
  const int head =
      common_head(reinterpret_cast<uint64_t>(move.to), sizeof(Out), reinterpret_cast<uint64_t>(move.from), sizeof(In));
  const Extent extent = extent_of(move.count, head, kWidth);
  if (extent.width == 1)
    move_tile<In, Out, 1>(move, extent, tile, static_cast<Wide>(scale));
  else
    move_tile<In, Out, kWidth>(move, extent, tile, static_cast<Wide>(scale));
}

// The type that moves kNbytes in one access; the compiler would take a vector of bytes apart and move each by itself.
template <int kNbytes>
using RawBytes =
    std::conditional_t<kNbytes == 16, uint4,
                       std::conditional_t<kNbytes == 8, uint2,
                                          std::conditional_t<kNbytes == 4, uint32_t,
                                                             std::conditional_t<kNbytes == 2, uint16_t, uint8_t>>>>;

// The same for bytes as they are.
template <int kWidth>
__device__ __forceinline__ void copy_tile(const Move& move, const Extent& extent, int64_t tile) {
  using Raw = RawBytes<kWidth>;
  const uint8_t* from = static_cast<const uint8_t*>(move.from);
  uint8_t* to = static_cast<uint8_t*>(move.to);
  for_tile<kWidth, kVectorsPerThread>(
      extent, tile, [&](int64_t i) { return *reinterpret_cast<const Raw*>(from + i); },
      [&](int64_t i, const Raw& bytes) { *reinterpret_cast<Raw*>(to + i) = bytes; },
      [&](int64_t i) { to[i] = from[i]; });
}

// Counts are bytes.
template <int kMoves>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ MoveTable<kMoves> table) {
  const int index = move_of(table, blockIdx.x);
  const Move& move = table.moves[index];
  const int64_t tile = blockIdx.x - table.first_tile[index];
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
