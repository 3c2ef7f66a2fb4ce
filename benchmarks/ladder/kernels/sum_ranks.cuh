// The tensors of several ranks added up in the order of the ranks: out[i] = in[0][i] + in[1][i] + ...
//
// Rungs 1 to 3 take one launch per rank, which adds that rank's tensor to a running sum in memory. The sum is float32
// also for half precision, which is rounded only once, by the last launch: it writes the result itself.
#pragma once

#include "common.cuh"

template <class In, class Out>
__device__ inline Out added(const float* sum, In in, i64 i) {
  return Narrow<Out>::of(sum ? sum[i] + widen(in) : widen(in));  // the first rank has no sum before it
}

// 1. Naive: a thread does kStretch neighbours, so the threads of a warp are far apart in each of three arrays.
template <class In, class Out>
__global__ void sum_naive(const float* sum, const In* in, Out* out, i64 count) {
  const i64 begin = thread_of_grid() * kStretch;
  for (i64 i = begin; i < begin + kStretch && i < count; ++i) out[i] = added<In, Out>(sum, in[i], i);
}

// 2. Coalesced: neighbouring threads, neighbouring elements; every transaction is used whole.
template <class In, class Out>
__global__ void sum_coalesced(const float* sum, const In* in, Out* out, i64 count) {
  for (i64 i = thread_of_grid(); i < count; i += threads_of_grid()) out[i] = added<In, Out>(sum, in[i], i);
}

// Where two arrays are aligned together, and the third with them; -1 if they never are.
template <int kWidth, class A, class B, class C>
__device__ inline i64 head_of_three(const A* one, const B* other, const C* third) {
  const i64 head = common_head<kWidth>(one, other);
  return head >= 0 && aligned<kWidth>(third + head) ? head : -1;
}

// 3. Vectorised: 16 bytes of the input an access, twice as many of the running sum where the input is half precision.
template <class In, class Out>
__global__ void sum_vectorised(const float* sum, const In* in, Out* out, i64 count) {
  constexpr int kWidth = kWidthOf<In>;
  const i64 head = sum ? head_of_three<kWidth>(in, out, sum) : common_head<kWidth>(in, out);
  const Cut cut = cut_of<kWidth>(count, head);
  for (i64 v = thread_of_grid(); v < cut.vectors; v += threads_of_grid()) {
    const i64 i = cut.head + v * kWidth;
    const auto next = load<kWidth>(in + i);
    Vector<float, kWidth> before = {};
    if (sum) before = load<kWidth>(sum + i);
    Vector<Out, kWidth> result;
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      result.at[k] = Narrow<Out>::of(sum ? before.at[k] + widen(next.at[k]) : widen(next.at[k]));
    store<kWidth>(out + i, result);
  }
  for (i64 s = thread_of_grid(); s < cut.singles; s += threads_of_grid()) {
    const i64 i = place_of<kWidth>(cut, s);
    out[i] = added<In, Out>(sum, in[i], i);
  }
}

// 4. Fused: one launch reads all ranks and keeps the sum in registers, so each element is read once and written once.
// The loads of kInFlight ranks do not need each other: all are on their way before the first is added. The additions
// do, and they stay in the order of the ranks, so the bits are those of the rungs above.
template <int kWidth, class T>
__device__ inline void sum_at(const T* const* in, int ranks, T* out, i64 i) {
  float sums[kWidth] = {};
  for (int first = 0; first < ranks; first += kInFlight) {
    Vector<T, kWidth> loaded[kInFlight] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (first + k < ranks) loaded[k] = load<kWidth>(in[first + k] + i);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k >= ranks) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e)
        sums[e] = first + k == 0 ? widen(loaded[k].at[e]) : sums[e] + widen(loaded[k].at[e]);
    }
  }
  Vector<T, kWidth> result;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) result.at[e] = Narrow<T>::of(sums[e]);
  store<kWidth>(out + i, result);
}

// A thread does one vector, and there are as many blocks as that takes: no loop, and many warps to hide the waiting.
template <class T>
__global__ void sum_fused(const T* const* in, int ranks, T* out, i64 count) {
  constexpr int kWidth = kWidthOf<T>;
  i64 head = common_head<kWidth>(out, out);
  for (int rank = 0; rank < ranks; ++rank)
    if (head >= 0 && !aligned<kWidth>(in[rank] + head)) head = -1;
  const Cut cut = cut_of<kWidth>(count, head);
  for (i64 v = thread_of_grid(); v < cut.vectors; v += threads_of_grid())
    sum_at<kWidth>(in, ranks, out, cut.head + v * kWidth);
  for (i64 s = thread_of_grid(); s < cut.singles; s += threads_of_grid())
    sum_at<1>(in, ranks, out, place_of<kWidth>(cut, s));
}
