// The launchers: each plans its grid, starts its kernel on a stream of the current device, and checks that it was
// started.  Pointers are trusted.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "core/kernel_calls.h"

namespace mgpu::cuda {

struct Transferred {  // one array to another, of the dtypes that the launch names; counts are elements
  void* to;
  const void* from;
  int64_t count;
};

void launch_cast(const std::vector<Transferred>& all, DType from, DType to, double scale, cudaStream_t stream);
void launch_copy(const std::vector<Transferred>& all, cudaStream_t stream);  // counts are bytes
void launch_sum_ranks(const SumRanks& call, cudaStream_t stream);
// Sums that fit a table, of one dtype and as many inputs each; in as few launches as possible.
bool fits_a_table(const SumRanks& call);
void launch_sums(const std::vector<const SumRanks*>& calls, cudaStream_t stream);
void launch_push_sum(const PushSum& call, cudaStream_t stream);
void launch_gather_rows(const GatherRows& call, cudaStream_t stream);
void launch_l2_norm(const L2Norm& call, cudaStream_t stream);
void launch_sgd(const Sgd& call, cudaStream_t stream);
void launch_adam(const Adam& call, cudaStream_t stream);
void launch_lion(const Lion& call, cudaStream_t stream);

}  // namespace mgpu::cuda
