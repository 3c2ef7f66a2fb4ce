// The one kernel of the room: k inputs, combined element by element in registers, stored to any number of outputs.
#pragma once

#include "core/types.h"

namespace mgpu::cpu {

struct Reduction {
  const void* const* in;  // combined in this order
  int in_count;
  void* const* out;  // all get the result; an output may be one of the inputs, exactly
  int out_count;
  int64_t begin;  // elements [begin, end) of each
  int64_t end;
  DType dtype;
  ReduceOp op;
  int divisor;  // avg divides by it after the sum; 1 leaves the sum (a partial one)
};

// Sums touch memory once: with k ranks, k reads and one write per output, whatever k is.
void reduce(const Reduction& reduction);

}  // namespace mgpu::cpu
