// The shipped arithmetic of the optimizers, in loops that differ in what they have on its way to the registers.
#pragma once

#include "backends/cuda/kernels/optimizers.cuh"

namespace mgpu::cuda::variants {

enum Loads { kPlain, kAhead, kTwo };  // a vector's loads, then its arithmetic; the next one's before; two vectors'

// Marked as used once, so that they are the first to leave the caches.
template <int kWidth, class T>
__device__ __forceinline__ Vector<T, kWidth> load_once(const T* from) {
#ifdef __CUDA_ARCH__
  static_assert(sizeof(Vector<T, kWidth>) == kAlignment, "one access");
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(from));
  Vector<T, kWidth> value;
  memcpy(&value, &raw, sizeof value);
  return value;
#else
  return load<kWidth>(from);
#endif
}
template <int kWidth, class T>
__device__ __forceinline__ void store_once(T* to, const Vector<T, kWidth>& value) {
#ifdef __CUDA_ARCH__
  uint4 raw;
  memcpy(&raw, &value, sizeof raw);
  __stcs(reinterpret_cast<uint4*>(to), raw);
#else
  store<kWidth>(to, value);
#endif
}

template <bool kOnce, int kWidth, class T, class Call>
__device__ __forceinline__ auto read_as(const Call& call, const Widened<T>* constants, const Gradients<T>& gradients,
                                        int64_t i) {
  if constexpr (kOnce) {
    AdamVectors<T, kWidth> in = {};
    in.parameter = load_once<kWidth>(static_cast<const T*>(call.flat.parameters) + i);
    in.average = load_once<kWidth>(static_cast<const T*>(call.exp_avg) + i);
    in.square = load_once<kWidth>(static_cast<const T*>(call.exp_avg_sq) + i);
    in.gradient = load_once<kWidth>(gradients.at + i);
    return in;
  } else {
    return read<kWidth>(call, constants, gradients, i);
  }
}
template <bool kOnce, int kWidth, class T, class Call, class Vectors>
__device__ __forceinline__ void update_as(const Call& call, const Widened<T>* constants, int64_t i, Vectors in) {
  if constexpr (kOnce) {
    compute<false, kWidth, T>(constants, in);
    store_once<kWidth>(static_cast<T*>(call.exp_avg) + i, in.average);
    store_once<kWidth>(static_cast<T*>(call.exp_avg_sq) + i, in.square);
    store_once<kWidth>(static_cast<T*>(call.flat.parameters) + i, in.parameter);
  } else {
    update<kWidth, T>(call, constants, i, in);
  }
}

template <Loads kLoads, class Load, class Finish>
__device__ __forceinline__ void for_vectors_as(int64_t first, int vectors, int width, Load&& load, Finish&& finish) {
  if constexpr (kLoads == kAhead) return for_vectors(first, vectors, width, load, finish);
  constexpr int kTogether = kLoads == kTwo ? 2 : 1;
#pragma unroll 1
  for (int v = threadIdx.x; v < vectors; v += kTogether * kThreads) {
    decltype(load(int64_t{})) in[kTogether] = {};
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
      if (k == 0 || v + k * kThreads < vectors) in[k] = load(first + (v + k * kThreads) * width);
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
      if (k == 0 || v + k * kThreads < vectors) finish(first + (v + k * kThreads) * width, in[k]);
  }
}

// Adam without its maximum, or another optimizer where !kOnce.
template <class T, Loads kLoads, bool kOnce, int kBlocks, class Call>
__global__ void __launch_bounds__(kThreads, kBlocks) flat_kernel(const __grid_constant__ Call call, Walk walk) {
  constexpr int kWidth = vector_width(sizeof(T), sizeof(T));
  for_segments<T>(
      call.flat, walk, [&](const auto* constants, const Gradients<T>& gradients, int64_t begin, int64_t end) {
        const uint64_t address = walk.base + begin * static_cast<int64_t>(sizeof(T));
        const Extent extent = extent_of(end - begin, common_head(address, sizeof(T), address, sizeof(T)), kWidth);
        for_vectors_as<kLoads>(
            begin + extent.head, static_cast<int>(extent.vectors), kWidth,
            [&](int64_t i) { return read_as<kOnce, kWidth, T>(call, constants, gradients, i); },
            [&](int64_t i, const auto& in) { update_as<kOnce, kWidth, T>(call, constants, i, in); });
        const auto single = [&](int64_t i) {
          update<1, T>(call, constants, i, read<1>(call, constants, gradients, i));
        };
        if (threadIdx.x < extent.head) single(begin + threadIdx.x);
        if (threadIdx.x < extent.tail) single(end - extent.tail + threadIdx.x);
      });
}

}  // namespace mgpu::cuda::variants
