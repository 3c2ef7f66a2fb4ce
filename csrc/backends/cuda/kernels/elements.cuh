// Elements and vectors of them on the device: how each dtype is widened for arithmetic, rounded back, and moved 16
// bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/launch_plan.h"

namespace mgpu::cuda {

// In which numbers of T are computed: half precision in float.
template <class T>
using Widened = std::conditional_t<std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, float, T>;
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

// The elements of an extent that belong to tile `tile`, dealt out to the threads of the block: `vector(i)` for whole
// vectors, i being the first element; `single(i)` for the head and the tail, which tile 0 does.
template <int kWidth, class OnVector, class OnSingle>
__device__ __forceinline__ void for_tile(const Extent& extent, int64_t tile, OnVector&& vector, OnSingle&& single) {
  const int64_t first = tile * kTileVectors;
#pragma unroll
  for (int k = 0; k < kVectorsPerThread; ++k) {
    const int64_t i = first + k * kThreads + threadIdx.x;
    if (i < extent.vectors) vector(extent.head + i * kWidth);
  }
  if (tile != 0) return;
  const int64_t behind = extent.head + extent.vectors * kWidth;
  if (threadIdx.x < extent.head) single(threadIdx.x);
  if (threadIdx.x < extent.tail) single(behind + threadIdx.x);
}

}  // namespace mgpu::cuda
