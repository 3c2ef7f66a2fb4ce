#include "backends/cuda/kernels/optimizers.cuh"
#include "backends/cuda/kernels/start.cuh"
#include "backends/cuda/launch.h"
#include "core/dispatch.h"

namespace mgpu::cuda {
namespace {

// Returns the address of element 0 modulo 16 bytes if it is the same for all buffers; otherwise -1, and then there are
// no vectors.
int common_base(const FlatBuffer& flat, const std::vector<const void*>& states) {
  const auto phase = [](const void* pointer) {
    return static_cast<int>(reinterpret_cast<uint64_t>(pointer) % kAlignment);
  };
  const int base = phase(flat.parameters);
  if (!flat.gradient_of && phase(flat.gradients) != base) return -1;
  for (const void* state : states)
    if (state && phase(state) != base) return -1;
  return base;
}

int64_t blocks_of(int64_t count, int64_t per_block) { return (count + per_block - 1) / per_block; }

template <class Call>
void update(const char* name, void (*kernel)(Call, Walk), const Call& call, int base, cudaStream_t stream) {
  const Walk walk{base, kFlatTile};
  start_kernel(name, kernel, blocks_of(call.flat.count, walk.per_block), stream, call, walk);
}
template <class T>
void update(const Sgd& call, int base, cudaStream_t stream) {
  update("sgd_kernel", sgd_kernel<T>, call, base, stream);
}
template <class T>
void update(const Adam& call, int base, cudaStream_t stream) {
  if (call.max_exp_avg_sq)
    update("adam_kernel", adam_kernel<T, true>, AdamOf<true>{call}, base, stream);
  else
    update("adam_kernel", adam_kernel<T, false>, AdamOf<false>{call}, base, stream);
}
template <class T>
void update(const Lion& call, int base, cudaStream_t stream) {
  update("lion_kernel", lion_kernel<T>, call, base, stream);
}

// `prepare` raises the steps and computes each segment's constants, which the update reads.
template <class Call>
void launch(const char* name, void (*prepare)(Call), const Call& call, int base, cudaStream_t stream) {
  dispatch_floating<Elements>(call.flat.dtype, "an optimizer", [&](auto one) {
    start_kernel(name, prepare, blocks_of(call.flat.segment_count, kThreads), stream, call);
    update<decltype(one)>(call, base, stream);
  });
}

}  // namespace

void launch_sgd(const Sgd& call, cudaStream_t stream) {
  launch("prepare_sgd_kernel", prepare_sgd_kernel, call, common_base(call.flat, {call.momentum}), stream);
}

void launch_adam(const Adam& call, cudaStream_t stream) {
  const int base = common_base(call.flat, {call.exp_avg, call.exp_avg_sq, call.max_exp_avg_sq});
  launch("prepare_adam_kernel", prepare_adam_kernel, call, base, stream);
}

void launch_lion(const Lion& call, cudaStream_t stream) {
  launch("prepare_lion_kernel", prepare_lion_kernel, call, common_base(call.flat, {call.exp_avg}), stream);
}

}  // namespace mgpu::cuda
