// Large calls in pieces, so that going by way of the host needs little staging memory: while one piece is moved, the
// next is put on the streams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/buffers.h"

namespace mgpu {

// Bytes of staging memory that one piece takes, all its buffers together; and the limit where nothing is staged.
constexpr int64_t kPieceNbytes = 64 * 1024 * 1024;
constexpr int64_t kOnePiece = INT64_MAX;

// Returns how many elements each of so many buffers has in a piece: at least one, and multiples of 256 where there are
// as many, so that pieces of aligned buffers are aligned.
inline int64_t piece_count(int64_t piece_nbytes, size_t buffers, DType dtype) {
  const int64_t count = piece_nbytes / static_cast<int64_t>(buffers * itemsize(dtype));
  return count < 256 ? std::max<int64_t>(count, 1) : count / 256 * 256;
}

inline const Buffer& whole_of(const ReduceCall& call) { return call.out; }
inline const Buffer& whole_of(const BroadcastCall& call) { return call.in; }
inline ReduceCall slice(const ReduceCall& call, const Chunk& chunk) {
  return {slices(call.in, chunk), slice(call.out, chunk)};
}
inline BroadcastCall slice(const BroadcastCall& call, const Chunk& chunk) {
  return {slice(call.in, chunk), slices(call.out, chunk)};
}

// Cuts large tensors of a batch and keeps small ones together: with `staged` buffers for each call, a piece takes at
// most so many bytes.  Empty tensors are left out.
template <class Call>
std::vector<std::vector<Call>> pieces_of(const std::vector<Call>& calls, int64_t piece_nbytes, size_t staged) {
  std::vector<std::vector<Call>> pieces(1);
  int64_t filled = 0;
  for (const Call& call : calls) {
    const Buffer& whole = whole_of(call);
    const int64_t step = piece_count(piece_nbytes, staged, whole.dtype);
    for (int64_t begin = 0; begin < whole.count; begin += step) {
      const Chunk chunk{begin, std::min(step, whole.count - begin)};
      const auto nbytes = static_cast<int64_t>(staged * itemsize(whole.dtype)) * chunk.count;
      if (filled > 0 && filled + nbytes > piece_nbytes) {
        pieces.emplace_back();
        filled = 0;
      }
      pieces.back().push_back(slice(call, chunk));
      filled += nbytes;
    }
  }
  return pieces;
}

}  // namespace mgpu
