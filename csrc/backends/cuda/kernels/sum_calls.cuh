// For the launches of sums: where the arrays are aligned together, and the operation as a type.
#pragma once

#include <type_traits>

#include "backends/cuda/kernels/start.cuh"
#include "core/kernel_calls.h"

namespace mgpu::cuda {

// Returns how many elements come before the first vector; -1, for no vectors, unless the addresses of all arrays are
// the same modulo 16 bytes.
template <class T, class Call>
int head_of_all(const Call& call) {
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const uint64_t first = address(call.in[0]);
  int head = common_head(first, sizeof(T), first, sizeof(T));
  for (const void* in : call.in)
    if ((address(in) - first) % kAlignment != 0) head = -1;
  for (const void* out : call.out)
    if ((address(out) - first) % kAlignment != 0) head = -1;
  return head;
}

template <class T, class Call>
Extent extent_of_all(const Call& call) {
  return extent_of(call.count, head_of_all<T>(call), vector_width(sizeof(T), sizeof(T)));
}

// Calls start(op) with the operation as a type.
template <class Start>
void with_op(ReduceOp op, Start&& start) {
  switch (op) {
    case ReduceOp::sum:
      return start(std::integral_constant<ReduceOp, ReduceOp::sum>());
    case ReduceOp::avg:
      return start(std::integral_constant<ReduceOp, ReduceOp::avg>());
    case ReduceOp::prod:
      return start(std::integral_constant<ReduceOp, ReduceOp::prod>());
    case ReduceOp::min:
      return start(std::integral_constant<ReduceOp, ReduceOp::min>());
    case ReduceOp::max:
      return start(std::integral_constant<ReduceOp, ReduceOp::max>());
  }
}

}  // namespace mgpu::cuda
