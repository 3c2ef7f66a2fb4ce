// Many tensors into one flat buffer, scaled and cast: flat[begin + i] = tensor[i] * scale.
//
// Rungs 1 to 3 need one launch per tensor, which copies it into a scratch buffer (In to In, scale 1), and then one
// launch over all of it, which scales and casts (In to Out). Each of these rungs is therefore one kernel, used twice.
#pragma once

#include "common.cuh"

// 1. Naive: a thread does kStretch neighbours. In every step of the loop the 32 threads of a warp are kStretch elements
// apart: 32 memory transactions for 32 elements, where 4 would do.
template <class In, class Out>
__global__ void pack_naive(const In* from, Out* to, i64 count, float scale) {
  const i64 begin = thread_of_grid() * kStretch;
  for (i64 i = begin; i < begin + kStretch && i < count; ++i) to[i] = Narrow<Out>::of(widen(from[i]) * scale);
}

// 2. Coalesced: neighbouring threads do neighbouring elements, and all go on by the width of the grid (a grid-stride
// loop). A warp now reads 128 bytes of float32 in 4 transactions of 32, and uses every byte of them.
template <class In, class Out>
__global__ void pack_coalesced(const In* from, Out* to, i64 count, float scale) {
  for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) to[i] = Narrow<Out>::of(widen(from[i]) * scale);
}

// A vector of the narrower dtype is 16 bytes; the wider one then needs two accesses.
template <class In, class Out>
constexpr int kPackWidth = kWidthOf<In> > kWidthOf<Out> ? kWidthOf<In> : kWidthOf<Out>;

template <int kWidth, class In, class Out>
__device__ inline void cast_to(Out* to, const Vector<In, kWidth>& in, float scale) {
  Vector<Out, kWidth> out;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) out.at[k] = Narrow<Out>::of(widen(in.at[k]) * scale);
  store<kWidth>(to, out);
}

// 3. Vectorised: 16 bytes an access, so a quarter of the instructions for the same bytes, and four times as many bytes
// on their way per thread. The price is alignment: a head and a tail of single elements, or nothing but single ones.
template <class In, class Out>
__global__ void pack_vectorised(const In* from, Out* to, i64 count, float scale) {
  constexpr int kWidth = kPackWidth<In, Out>;
  const i64 head = common_head<kWidth>(from, to);
  const Cut cut = cut_of<kWidth>(count, head);
  for (i64 v = thread_of_grid(); v < cut.vectors; v += threads_of_grid()) {
    const i64 i = cut.head + v * kWidth;
    cast_to<kWidth>(to + i, load<kWidth>(from + i), scale);
  }
  for (i64 s = thread_of_grid(); s < cut.singles; s += threads_of_grid()) {
    const i64 i = place_of<kWidth>(cut, s);
    to[i] = Narrow<Out>::of(widen(from[i]) * scale);
  }
}

// 4. Fused: one launch and one pass for everything. The scratch buffer is gone, and with it half of the bytes; small
// tensors no longer pay a launch each. A block does one tile of one tensor and finds out which by binary search in the
// table; a thread has kInFlight loads on their way before it waits for the first.
struct Piece {
  const void* from;
  i64 begin;       // in the flat buffer
  i64 count;       // elements, more than 0
  i64 first_tile;  // the tiles of all pieces are numbered through
};

template <class In, class Out>
constexpr int kPackTile = kThreads * kInFlight * kPackWidth<In, Out>;  // elements

__device__ inline const Piece& piece_of(const Piece* pieces, int piece_count, i64 tile) {
  int low = 0, high = piece_count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (pieces[middle].first_tile <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  return pieces[low];
}

template <class In, class Out>
__global__ void pack_fused(const Piece* pieces, int piece_count, Out* flat, float scale) {
  constexpr int kWidth = kPackWidth<In, Out>, kTile = kPackTile<In, Out>;
  const Piece& piece = piece_of(pieces, piece_count, blockIdx.x);
  const i64 begin = (blockIdx.x - piece.first_tile) * kTile;
  const i64 count = piece.count - begin < kTile ? piece.count - begin : kTile;
  const In* from = static_cast<const In*>(piece.from) + begin;
  Out* to = flat + piece.begin + begin;
  const i64 head = common_head<kWidth>(from, to);
  const Cut cut = cut_of<kWidth>(count, head);

  Vector<In, kWidth> in[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const i64 v = k * kThreads + threadIdx.x;
    if (v < cut.vectors) in[k] = load<kWidth>(from + cut.head + v * kWidth);
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const i64 v = k * kThreads + threadIdx.x;
    if (v < cut.vectors) cast_to<kWidth>(to + cut.head + v * kWidth, in[k], scale);
  }
  for (i64 s = threadIdx.x; s < cut.singles; s += kThreads) {
    const i64 i = place_of<kWidth>(cut, s);
    to[i] = Narrow<Out>::of(widen(from[i]) * scale);
  }
}
