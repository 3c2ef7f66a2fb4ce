// What all rungs use: which thread am I, elements widened and rounded, and arrays cut into vectors of 16 bytes.
// nvcc reads this file for the CUDA C++ rungs and NVRTC for cupy's, so it includes nothing of the host.
#pragma once

#include <cuda_fp16.h>

typedef long long i64;
typedef unsigned char u8;

constexpr int kThreads = 256;  // of a block
constexpr int kStretch = 32;   // neighbours that one thread does in a naive rung
constexpr int kInFlight = 4;   // loads of a thread in a fused rung that are on their way before it stores anything

__device__ inline i64 thread_of_grid() { return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ inline i64 threads_of_grid() { return static_cast<i64>(gridDim.x) * kThreads; }

// Half precision is computed in float32, and rounded once, to nearest.
__device__ inline float widen(float value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(u8 value) { return static_cast<float>(value); }

template <class T>
struct Narrow {
  __device__ static T of(float value) { return static_cast<T>(value); }
};
template <>
struct Narrow<__half> {
  __device__ static __half of(float value) { return __float2half_rn(value); }
};

// Neighbouring elements that one instruction loads or stores. The hardware moves at most 16 bytes a thread, and only
// from a place that is a multiple of what it moves.
constexpr int kAccess = 16;

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < kAccess ? sizeof(T) * kWidth : kAccess) Vector {
  T at[kWidth];
};

template <int kWidth, class T>
__device__ inline Vector<T, kWidth> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(from);
}
// Whole 16 bytes by an intrinsic: left to itself the compiler takes some of these vectors apart again, into one store
// per element (read its PTX), and that would undo the rung.
template <int kWidth, class T>
__device__ inline void store(T* to, const Vector<T, kWidth>& value) {
  if constexpr (sizeof(value) % kAccess == 0) {
    constexpr int kPieces = sizeof(value) / kAccess;
    uint4 raw[kPieces];
    memcpy(raw, &value, sizeof(value));
#pragma unroll
    for (int k = 0; k < kPieces; ++k) __stwb(reinterpret_cast<uint4*>(to) + k, raw[k]);
  } else {
    *reinterpret_cast<Vector<T, kWidth>*>(to) = value;
  }
}

// How many elements of T fill 16 bytes.
template <class T>
constexpr int kWidthOf = kAccess / static_cast<int>(sizeof(T));

template <int kWidth, class T>
__device__ inline bool aligned(const T* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % alignof(Vector<T, kWidth>) == 0;
}

// How many elements stand before the first place where both arrays are aligned; -1 if they never are together.
template <int kWidth, class A, class B>
__device__ inline i64 common_head(const A* one, const B* other) {
  for (int head = 0; head < kWidth; ++head)
    if (aligned<kWidth>(one + head) && aligned<kWidth>(other + head)) return head;
  return -1;
}

// `count` elements as a head of single ones, whole vectors, and a tail of single ones. Without alignment all are
// single.
struct Cut {
  i64 head, vectors, singles;
};
template <int kWidth>
__device__ inline Cut cut_of(i64 count, i64 head) {
  if (head < 0 || head > count) return {count, 0, count};
  const i64 vectors = (count - head) / kWidth;
  return {head, vectors, count - vectors * kWidth};
}
// Where single number `s` stands: in the head, or behind the vectors.
template <int kWidth>
__device__ inline i64 place_of(const Cut& cut, i64 s) {
  return s < cut.head ? s : s + cut.vectors * kWidth;
}
