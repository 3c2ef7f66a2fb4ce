// Helpers for arithmetic with buffers.
#pragma once

#include "core/collectives.h"
#include "core/plan.h"

namespace mgpu {

inline void* at(const Buffer& buffer, int64_t element) {
  return static_cast<char*>(buffer.pointer) + element * static_cast<int64_t>(itemsize(buffer.dtype));
}

// Elements [begin, begin + count) of a buffer, or of each.  A buffer without memory stays one.
inline Buffer slice(const Buffer& buffer, const Chunk& chunk) {
  return {buffer.pointer ? at(buffer, chunk.begin) : nullptr, chunk.count, buffer.dtype};
}
Buffers slices(const Buffers& buffers, const Chunk& chunk);

inline CopyBlock plain_copy(void* to, const void* from, int64_t nbytes) { return {to, from, 1, nbytes, 0, 0}; }

// By what a reduction over so many ranks is divided at its end.
inline int divisor_of(ReduceOp op, size_t ranks) { return op == ReduceOp::avg ? static_cast<int>(ranks) : 1; }

// out[0] = out[1] = ... = in[0] op in[1] op ...
SumRanks sum_of(const Buffers& in, const Buffers& out, ReduceOp op, int divisor);

// Work for several streams, gathered so that each stream gets its own in one call.
template <class Work>
class PerStream {
 public:
  void add(Stream stream, Work work) {
    for (auto& [on, all] : work_)
      if (on == stream) return all.push_back(std::move(work));
    work_.push_back({stream, {std::move(work)}});
  }
  const std::vector<std::pair<Stream, std::vector<Work>>>& all() const { return work_; }

 private:
  std::vector<std::pair<Stream, std::vector<Work>>> work_;
};

// Each stream once, in the order in which they first come.
Streams distinct(const Streams& streams);

}  // namespace mgpu
