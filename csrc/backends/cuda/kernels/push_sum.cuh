// Small all-reduces between devices that reach each other, one launch a rank:
//
//   rank 0, block b: values ──> its slot at ranks 1, 2 ──> its flags there │ all flags here? │ own + slot 1 + slot 2
//   rank 1, block b: values ──> its slot at ranks 0, 2 ──> its flags there │ all flags here? │ slot 0 + own + slot 2
//   rank 2, block b: ...
//
// Blocks of the same number do the same tiles and wait for each other alone.  Of two launches with the same memory the
// second begins when the first has ended on its device; a flag of launch n + 1 thus says that its rank has read the
// slots of launch n, which launch n + 2 writes again.
//
// One-shot all-reduce with flags, as in vLLM's custom_all_reduce and TensorRT-LLM, but written to the peers (posted
// writes) instead of read from them.
#pragma once

#include "backends/cuda/kernels/sum_ranks.cuh"
#include "core/kernel_calls.h"

namespace mgpu::cuda {

struct PushTable {
  const void* in[kMostRanks];      // what is added up: this rank's own values, and its slots of the others'
  void* slot[kMostRanks];          // of this rank, at each other
  uint64_t* flags_at[kMostRanks];  // of this rank's blocks, at each other
  const uint64_t* flags;           // of all ranks' blocks, here
  uint32_t* given_up;
  uint64_t* late;  // see PushSum
  void* out;
  int rank;
  int ranks;
  int divisor;
  int blocks;
  Extent extent;
  uint64_t sequence;
  int64_t limit_ns;
};

// Whoever reads the flag also sees all that this block has written before.
__device__ __forceinline__ void set_flag(uint64_t* flag, uint64_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  *flag = value;
#endif
}
__device__ __forceinline__ uint64_t read_flag(const uint64_t* flag) {
#ifdef __CUDA_ARCH__
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return *flag;
#endif
}
__device__ __forceinline__ uint64_t now_ns() {
#ifdef __CUDA_ARCH__
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value)::"memory");
  return value;
#elif defined(__CUDACC__)
  return 0;  // nvcc reads it for the host, too, which does not run it
#else
  return fakeGlobalTimer();
#endif
}

constexpr int64_t kPatienceNs = 1'000'000;  // a look at the host's memory takes as long as a small all-reduce

// Waits for a block of another rank, up to the limit or until the host says that it is in vain.
__device__ __forceinline__ void wait_for(const PushTable& table, int rank) {
  const uint64_t* flag = table.flags + rank * kPushBlocks + blockIdx.x;
  uint64_t begin = 0;
  while (read_flag(flag) < table.sequence) {
    const uint64_t now = now_ns();
    if (begin == 0) begin = now;
    const auto waited = static_cast<int64_t>(now - begin);
    if (waited > table.limit_ns || (waited > kPatienceNs && read_flag(table.late) != 0)) {
      if (atomicAdd(table.given_up, 1u) == 0) set_flag(table.late, static_cast<uint64_t>(rank) + 1);
      return;
    }
    __nanosleep(20);
  }
}

// Returns the same to all threads of the block: whether this rank has given up a wait, in this launch or an earlier
// one.
__device__ __forceinline__ bool has_given_up(const PushTable& table) {
  __shared__ bool given_up;
  __syncthreads();  // all have read what was there before
  if (threadIdx.x == 0) given_up = *table.given_up != 0;
  __syncthreads();
  return given_up;
}

template <class T, int kWidth>
__device__ __forceinline__ void push_tile(const PushTable& table, int64_t tile) {
  const T* in = static_cast<const T*>(table.in[table.rank]);
  const auto push = [&](int64_t i, const auto& values) {
    constexpr int kCount = sizeof(values.at) / sizeof(T);
#pragma unroll 1
    for (int rank = 0; rank < table.ranks; ++rank)
      if (rank != table.rank) store<kCount>(static_cast<T*>(table.slot[rank]) + i, values);
  };
  for_tile<kWidth, together(kAlignment)>(
      table.extent, tile, [&](int64_t i) { return load<kWidth>(in + i); }, push,
      [&](int64_t i) { push(i, load<1>(in + i)); });
}

// Fills a tile of the output with NaN, because a wait was given up.
template <class T>
__device__ __forceinline__ void spoil_tile(const PushTable& table, int64_t tile) {
  T nan;
  if constexpr (std::is_same_v<T, double>)
    nan = static_cast<double>(NAN);
  else
    nan = narrow<T>(NAN);
  const Extent& extent = table.extent;
  const auto spoil = [&](int64_t begin, int64_t end) {
#pragma unroll 1
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) static_cast<T*>(table.out)[i] = nan;
  };
  const int64_t tail = extent.head + extent.vectors * extent.width, count = kTileVectors * extent.width;
  const int64_t begin = extent.head + tile * count;
  spoil(begin, begin + count < tail ? begin + count : tail);
  if (tile != 0) return;
  spoil(0, extent.head);
  spoil(tail, tail + extent.tail);
}

// Calls work(tile, width) for each tile of this block; `width`, a type, is the number of elements in a vector.
template <class T, class Work>
__device__ __forceinline__ void for_tiles(const PushTable& table, Work&& work) {
  const int64_t tiles = tiles_of(table.extent);
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles; tile += table.blocks) {
    if (table.extent.width == 1)
      work(tile, std::integral_constant<int, 1>());
    else
      work(tile, std::integral_constant<int, vector_width(sizeof(T), sizeof(T))>());
  }
}

template <ReduceOp kOp, class T>
__global__ void __launch_bounds__(kThreads, 1) push_sum_kernel(const __grid_constant__ PushTable table) {
  // A rank that has given up sends nothing more: a late one may still have to read the values that it sent before.
  bool given_up = has_given_up(table);
  if (!given_up) {
    for_tiles<T>(table, [&](int64_t tile, auto width) { push_tile<T, width.value>(table, tile); });
    __syncthreads();  // all values of the block are written before one of its threads says so
    const int rank = static_cast<int>(threadIdx.x);
    if (rank < table.ranks && rank != table.rank) {
      set_flag(table.flags_at[rank] + blockIdx.x, table.sequence);
      wait_for(table, rank);
    }
    given_up = has_given_up(table);  // its barriers also say that all ranks' values are there before one is read
  }
  if (given_up) {
    if constexpr (!std::is_integral_v<T>)
      for (int64_t tile = blockIdx.x; tile < tiles_of(table.extent); tile += table.blocks) spoil_tile<T>(table, tile);
    return;
  }
  for_tiles<T>(table, [&](int64_t tile, auto width) {
    sum_tile_of<kOp, T, width.value, 0>(
        table, table.ranks, table.divisor, table.extent, tile,
        [&](int64_t i, const auto& sum) { store<sizeof(sum.at) / sizeof(T)>(static_cast<T*>(table.out) + i, sum); });
  });
}

}  // namespace mgpu::cuda
