#include "core/buffers.h"

#include <algorithm>

namespace mgpu {

Buffers slices(const Buffers& buffers, const Chunk& chunk) {
  Buffers result;
  for (const Buffer& buffer : buffers) result.push_back(slice(buffer, chunk));
  return result;
}

SumRanks sum_of(const Buffers& in, const Buffers& out, ReduceOp op, int divisor) {
  SumRanks sum{{}, {}, out[0].count, out[0].dtype, op, divisor};
  for (const Buffer& buffer : in) sum.in.push_back(buffer.pointer);
  for (const Buffer& buffer : out) sum.out.push_back(buffer.pointer);
  return sum;
}

Streams distinct(const Streams& streams) {
  Streams result;
  for (const Stream& stream : streams)
    if (std::find(result.begin(), result.end(), stream) == result.end()) result.push_back(stream);
  return result;
}

}  // namespace mgpu
