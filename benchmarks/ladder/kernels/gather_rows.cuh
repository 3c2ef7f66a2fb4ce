// Rows of bytes by index, normalised: out[b][i] = rows[index[b]][i] * scale + shift. Every index is in range.
//
// Rungs 1 to 3 take two launches: `pick` copies the rows into a batch of bytes, `normalise` makes numbers of them.
#pragma once

#include "common.cuh"

// 1. Naive: a thread per row, which is how one would write it in C. The threads of a warp are a whole row apart, and a
// batch of 256 rows keeps 256 threads busy on a GPU that has room for a hundred thousand.
__global__ void pick_naive(const u8* rows, i64 row_count, const i64* index, i64 batch, u8* picked) {
  const i64 b = thread_of_grid();
  if (b >= batch) return;
  for (i64 i = 0; i < row_count; ++i) picked[b * row_count + i] = rows[index[b] * row_count + i];
}
template <class Out>
__global__ void normalise_naive(const u8* picked, i64 row_count, i64 batch, Out* out, float scale, float shift) {
  const i64 b = thread_of_grid();
  if (b >= batch) return;
  for (i64 i = b * row_count; i < (b + 1) * row_count; ++i) out[i] = Narrow<Out>::of(widen(picked[i]) * scale + shift);
}

// 2. Coalesced: a block per row, a thread per byte of it. A warp reads 32 neighbouring bytes: one transaction.
// To normalise, rows no longer matter: the batch is one long array.
__global__ void pick_coalesced(const u8* rows, i64 row_count, const i64* index, i64 batch, u8* picked) {
  for (i64 b = blockIdx.x; b < batch; b += gridDim.x)
    for (i64 i = threadIdx.x; i < row_count; i += kThreads) picked[b * row_count + i] = rows[index[b] * row_count + i];
}
template <class Out>
__global__ void normalise_coalesced(const u8* picked, i64 row_count, i64 batch, Out* out, float scale, float shift) {
  for (i64 i = thread_of_grid(); i < batch * row_count; i += threads_of_grid())
    out[i] = Narrow<Out>::of(widen(picked[i]) * scale + shift);
}

// 3. Vectorised: 16 bytes of a row an access where source and target are aligned together; they are if rows are
// multiples of 16 bytes, as 28 x 28 pixels are, and a row of odd length goes byte by byte as before.
__global__ void pick_vectorised(const u8* rows, i64 row_count, const i64* index, i64 batch, u8* picked) {
  constexpr int kWidth = kWidthOf<u8>;
  for (i64 b = blockIdx.x; b < batch; b += gridDim.x) {
    const u8* from = rows + index[b] * row_count;
    u8* to = picked + b * row_count;
    const i64 head = common_head<kWidth>(from, to);
    const Cut cut = cut_of<kWidth>(row_count, head);
    for (i64 v = threadIdx.x; v < cut.vectors; v += kThreads) {
      const i64 i = cut.head + v * kWidth;
      store<kWidth>(to + i, load<kWidth>(from + i));
    }
    for (i64 s = threadIdx.x; s < cut.singles; s += kThreads) {
      const i64 i = place_of<kWidth>(cut, s);
      to[i] = from[i];
    }
  }
}

template <int kWidth, class Out>
__device__ inline void normalised_to(Out* to, const Vector<u8, kWidth>& pixels, float scale, float shift) {
  Vector<Out, kWidth> out;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) out.at[k] = Narrow<Out>::of(widen(pixels.at[k]) * scale + shift);
  store<kWidth>(to, out);
}

// The 16 bytes are of the result, which is the wider side: a warp then writes 512 bytes without a gap.
template <class Out>
__global__ void normalise_vectorised(const u8* picked, i64 row_count, i64 batch, Out* out, float scale, float shift) {
  constexpr int kWidth = kWidthOf<Out>;
  const i64 head = common_head<kWidth>(picked, out);
  const Cut cut = cut_of<kWidth>(batch * row_count, head);
  for (i64 v = thread_of_grid(); v < cut.vectors; v += threads_of_grid()) {
    const i64 i = cut.head + v * kWidth;
    normalised_to<kWidth>(out + i, load<kWidth>(picked + i), scale, shift);
  }
  for (i64 s = thread_of_grid(); s < cut.singles; s += threads_of_grid()) {
    const i64 i = place_of<kWidth>(cut, s);
    out[i] = Narrow<Out>::of(widen(picked[i]) * scale + shift);
  }
}

// 4. Fused: one launch picks and normalises, so the batch of bytes is never written and never read again. A block does
// kInFlight rows at once: the addresses of a row are known only when its index has been read, and so the threads wait
// for four indices together, and then for four rows together, instead of one after the other.
template <int kWidth, class Out>
__device__ inline void gather_rows_at(const u8* const* from, i64 here, i64 row_count, Out* to, float scale,
                                      float shift) {
  for (i64 i = threadIdx.x * kWidth; i < row_count; i += kThreads * kWidth) {
    Vector<u8, kWidth> pixels[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (k < here) pixels[k] = load<kWidth>(from[k] + i);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (k < here) normalised_to<kWidth>(to + k * row_count + i, pixels[k], scale, shift);
  }
}
template <class Out>
__global__ void gather_fused(const u8* rows, i64 row_count, const i64* index, i64 batch, Out* out, float scale,
                             float shift) {
  constexpr int kWidth = kWidthOf<Out>;
  const i64 first = static_cast<i64>(blockIdx.x) * kInFlight;
  const i64 here = batch - first < kInFlight ? batch - first : kInFlight;
  const u8* from[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) from[k] = rows + (k < here ? index[first + k] : 0) * row_count;
  Out* to = out + first * row_count;
  // All rows are aligned if the first of each array is, and their length keeps it so.
  if (row_count % kWidth == 0 && aligned<kWidth>(rows) && aligned<kWidth>(out))
    gather_rows_at<kWidth>(from, here, row_count, to, scale, shift);
  else
    gather_rows_at<1>(from, here, row_count, to, scale, shift);
}
