// How the launchers start a kernel: by the runtime's own function instead of the triple brackets, because its return
// value is this launch's, and because a host's compiler can read it (the tests run these files without a GPU).
#pragma once

#include <cuda_runtime.h>

#include <tuple>
#include <type_traits>

#include "common.cuh"

constexpr i64 kMostBlocks = 4096;  // of a grid-stride loop: several times what any GPU holds at once

inline i64 blocks_of(i64 count, i64 per_block) { return (count + per_block - 1) / per_block; }
inline i64 few_blocks_of(i64 count) {
  const i64 blocks = blocks_of(count, kThreads);
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

// Returns the runtime's code, 0 for success. Nothing to do is no launch: a grid of no blocks is an error.
template <class... Parameters, class... Arguments>
int start(void (*kernel)(Parameters...), i64 blocks, void* stream, Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  std::tuple<std::remove_const_t<Parameters>...> given(arguments...);
  return std::apply(
      [&](auto&... each) {
        void* pointers[] = {&each...};
        return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), pointers, 0,
                                static_cast<cudaStream_t>(stream));
      },
      given);
}
