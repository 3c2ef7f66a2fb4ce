// Elements and vectors of them on the device: how each dtype is widened for arithmetic, rounded back, and moved 16
// bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backends/cuda/launch_plan.h"

namespace mgpu::cuda {

struct Elements {  // see core/dispatch.h
  using f16 = __half;
  using bf16 = __nv_bfloat16;
};

// The type in which T is computed: float for half precision, and 32 bits for bytes, which wrap when they are stored.
template <class T>
using Widened = std::conditional_t<std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, float,
                                   std::conditional_t<std::is_same_v<T, uint8_t>, uint32_t, T>>;
// In which T and U are computed together: float64 where one is.
template <class T, class U>
using Common = std::conditional_t<std::is_same_v<T, double> || std::is_same_v<U, double>, double, Widened<T>>;

template <class Wide, class T>
__device__ __forceinline__ Wide widen(T value) {
  if constexpr (std::is_same_v<T, __half>)
    return static_cast<Wide>(__half2float(value));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return static_cast<Wide>(__bfloat162float(value));
  else
    return static_cast<Wide>(value);
}

// Rounded to nearest, ties to even.
template <class T, class Wide>
__device__ __forceinline__ T narrow(Wide value) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(static_cast<float>(value));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

// kWidth elements that are loaded and stored together; on a multiple of 16 bytes, or of their size if that is less.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < kAlignment ? sizeof(T) * kWidth : kAlignment) Vector {
  T at[kWidth];
};

template <int kWidth, class T>
__device__ __forceinline__ Vector<T, kWidth> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(from);
}
// By name, because left to itself the compiler takes one vector in four apart into single stores (seen in its PTX), and
// single stores to a peer are the slowest there are.
template <int kWidth, class T>
__device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(value) % kAlignment == 0) {
    uint4 raw[sizeof(value) / kAlignment];
    memcpy(raw, &value, sizeof(value));
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(value) / kAlignment); ++k)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint4*>(to) + k), "r"(raw[k].x),
                   "r"(raw[k].y), "r"(raw[k].z), "r"(raw[k].w)
                   : "memory");
    return;
  }
#endif
  *reinterpret_cast<Vector<T, kWidth>*>(to) = value;
}

// Runs over the elements of an extent that belong to tile `tile`, spread over the threads of the block.  `load(i)`
// returns a vector from element i on and `store(i, vector)` uses it; of a whole tile, each thread loads kTogether
// vectors before it stores the first, because a store, which may alias, holds later loads back until it has its data.
// `single(i)` does one element of the head or the tail, which belong to tile 0.
template <int kWidth, int kTogether, class Load, class Store, class Single>
__device__ __forceinline__ void for_tile(const Extent& extent, int64_t tile, Load&& load, Store&& store,
                                         Single&& single) {
  static_assert(kVectorsPerThread % kTogether == 0, "a thread's vectors are a whole number of batches");
  const int64_t first = tile * kTileVectors + threadIdx.x;
  const auto element = [&](int k) { return extent.head + (first + k * kThreads) * kWidth; };
  if ((tile + 1) * kTileVectors <= extent.vectors) {
#pragma unroll 1  // the stores keep one batch's loads from beginning before the last batch is done
    for (int k = 0; k < kVectorsPerThread; k += kTogether) {
      decltype(load(int64_t{})) loaded[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) loaded[j] = load(element(k + j));
#pragma unroll
      for (int j = 0; j < kTogether; ++j) store(element(k + j), loaded[j]);
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < kVectorsPerThread; ++k)
      if (first + k * kThreads < extent.vectors) store(element(k), load(element(k)));
  }
  if constexpr (kWidth == 1) return;  // neither head nor tail
  if (tile != 0) return;
  const int64_t behind = extent.head + extent.vectors * kWidth;
  if (threadIdx.x < extent.head) single(threadIdx.x);
  if (threadIdx.x < extent.tail) single(behind + threadIdx.x);
}

}  // namespace mgpu::cuda
