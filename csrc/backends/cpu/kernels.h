// The arithmetic of the backend.  The same source is compiled once per instruction set, each in a namespace and with
// flags of its own, and the widest that the processor knows is taken when the program starts.  (The compiler's own
// target_clones would be shorter, but it splits vectors for the plain processor before it makes the clones: a minimum
// took five times as long, a sum of f16 three times; measured.)
#pragma once

#include <vector>

#include "core/kernel_calls.h"
#include "core/types.h"

namespace mgpu::cpu {

// k inputs, combined element by element in registers, stored to any number of outputs: memory is touched once, with k
// reads and one write per output, whatever k is.
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

// Elements [begin, end) of a segment of flat parameters; `segment` is its row of the table.
struct SegmentRange {
  const int64_t* segment;
  int64_t begin;
  int64_t end;
};

struct Kernels {
  const char* level;  // the instruction set
  void (*reduce)(const Reduction&);
  void (*gather_rows)(const GatherRows&, int64_t begin, int64_t end);  // entries [begin, end) of the index
  void (*scale_cast)(const ScaleCast&, int64_t begin, int64_t end);
  double (*sum_of_squares)(const void* in, DType dtype, int64_t begin, int64_t end);
  void (*sgd)(const Sgd&, const SegmentRange&);
  void (*adam)(const Adam&, const SegmentRange&);
  void (*lion)(const Lion&, const SegmentRange&);
};

// Those that this processor can run, the widest last.  All give the same bits.
const std::vector<Kernels>& usable_kernels();
inline const Kernels& kernels() { return usable_kernels().back(); }

}  // namespace mgpu::cpu
