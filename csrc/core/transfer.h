// Scatter and gather, over door 1.  A dense tensor that is cut along one dimension is, in memory, `outer` runs of
// (rows of that dimension x `inner_nbytes`); a chunk is a rectangle of it.  So cutting along dim > 0 is a strided copy
// straight from the source, with no contiguous copy first, and gather writes straight into the result.
#pragma once

#include <vector>

#include "core/device_ops.h"

namespace mgpu {

// How a whole tensor lies in memory, seen from the dimension along which it is cut.
struct Layout {
  void* pointer;
  int64_t outer;         // runs: product of the sizes outside the dimension (slower in memory)
  int64_t rows;          // size of the dimension
  int64_t inner_nbytes;  // bytes of one row in one run: what is faster in memory, times the item size
};

// Rank r's part: `rows` of them, dense in a layout of its own with the same outer and inner_nbytes.
struct Part {
  void* pointer;
  int64_t rows;
};

void scatter(DeviceOps& ops, const Layout& whole, const std::vector<Part>& parts);
void gather(DeviceOps& ops, const std::vector<Part>& parts, const Layout& whole);

}  // namespace mgpu
