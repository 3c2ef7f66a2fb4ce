// What a host compiler needs to read kernels, and to run them: a block's threads take turns on one thread of the host,
// and switch at a barrier.
#pragma once

#include <math.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time; where kernels sleep, nothing is kept there meanwhile

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

extern dim3 threadIdx, blockIdx;
void __syncthreads();
double __shfl_down_sync(unsigned mask, double value, int offset);
void __nanosleep(unsigned ns);  // others run meanwhile, of this launch and of others
uint64_t fakeGlobalTimer();     // moves while somebody sleeps
inline void __threadfence() {}  // one thread of the host runs them all
inline unsigned atomicAdd(unsigned* at, unsigned value) { return std::exchange(*at, *at + value); }

// A kernel as the host's compiler made it, and what PTX of it needs: its symbol, and each argument's address and size.
struct FakeKernel {
  const void* symbol;
  unsigned blocks, threads;
  std::vector<std::pair<const void*, size_t>> arguments;
  std::function<void()> body;
};
// Returns a function that goes on with the kernel, and returns whether it has ended: a kernel whose threads sleep until
// others have run is asked again.
std::function<bool()> fakeStartKernel(const FakeKernel& kernel, int device);
// The same for `body` as every thread of every block.
std::function<bool()> fakeStartGrid(unsigned blocks, unsigned threads, std::function<void()> body);
bool fakeHasCode();
cudaError_t fakeLaunch(cudaStream_t stream, std::function<bool(int device)> work);  // asked until it returns true
size_t fakeMostArgumentBytes();  // of a launch: 4 KiB where FAKE_CUDA_DRIVER is older than 12.1

struct cudaFuncAttributes {};
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)(Parameters...)) {
  return fakeHasCode() ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Values, size_t... kIndices>
Values fakeArguments(void** arguments, std::index_sequence<kIndices...>) {
  return Values(*static_cast<std::tuple_element_t<kIndices, Values>*>(arguments[kIndices])...);
}

// Arguments are copied before the call returns, as CUDA does.
template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, void** arguments, size_t,
                             cudaStream_t stream) {
  using Values = std::tuple<std::remove_const_t<Parameters>...>;
  if (blocks.x == 0 || blocks.x > 2147483647 || threads.x == 0 || threads.x > 1024) return cudaErrorInvalidValue;
  if ((sizeof(Parameters) + ...) > fakeMostArgumentBytes()) return cudaErrorInvalidValue;
  const auto values =
      std::make_shared<const Values>(fakeArguments<Values>(arguments, std::index_sequence_for<Parameters...>{}));
  FakeKernel made{reinterpret_cast<const void*>(kernel), blocks.x, threads.x, {}, [=] { std::apply(kernel, *values); }};
  std::apply([&](const auto&... each) { made.arguments = {{static_cast<const void*>(&each), sizeof each}...}; },
             *values);
  return fakeLaunch(stream, [made, running = std::function<bool()>()](int device) mutable {
    if (!running) running = fakeStartKernel(made, device);
    return running();
  });
}
