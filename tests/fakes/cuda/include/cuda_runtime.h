// What a host compiler needs to read kernels, and to run them: a block's threads take turns on one thread of the host,
// and change places at a barrier.
#pragma once

#include <math.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static  // one block runs at a time

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

extern dim3 threadIdx, blockIdx;
void __syncthreads();
double __shfl_down_sync(unsigned mask, double value, int offset);

// Runs `body` as every thread of every block.
void fakeRunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body);
bool fakeHasCode();
cudaError_t fakeLaunch(cudaStream_t stream, std::function<void()> work);

struct cudaFuncAttributes {};
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)(Parameters...)) {
  return fakeHasCode() ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Values, size_t... kPlaces>
Values fakeArguments(void** arguments, std::index_sequence<kPlaces...>) {
  return Values(*static_cast<std::tuple_element_t<kPlaces, Values>*>(arguments[kPlaces])...);
}

// Arguments are copied before the call returns, as CUDA does.
template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, void** arguments, size_t,
                             cudaStream_t stream) {
  using Values = std::tuple<std::remove_const_t<Parameters>...>;
  const auto values = fakeArguments<Values>(arguments, std::index_sequence_for<Parameters...>{});
  return fakeLaunch(stream, [=] { fakeRunGrid(blocks.x, threads.x, [&] { std::apply(kernel, values); }); });
}
