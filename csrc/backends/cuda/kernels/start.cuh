// Starts a kernel by the runtime's own function instead of the triple brackets: its return value is the error of this
// launch, while cudaGetLastError may return an older one; and a host compiler can compile it, so that the tests run
// these files on a fake runtime.
#pragma once

#include <cuda_runtime.h>

#include <tuple>

#include "backends/cuda/check.h"
#include "backends/cuda/launch_plan.h"

namespace mgpu::cuda {

template <class... Parameters, class... Arguments>
void start_kernel(const char* name, void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
                  const Arguments&... arguments) {
  std::tuple<std::remove_const_t<Parameters>...> given(arguments...);
  std::apply(
      [&](auto&... each) {
        void* pointers[] = {&each...};
        check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), pointers, 0, stream), name);
      },
      given);
}

}  // namespace mgpu::cuda
