#include "core/checks.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace mgpu {
namespace {

std::string rank_text(size_t rank) { return "rank " + std::to_string(rank) + ": "; }

void check_buffer(const Buffer& buffer, int64_t count, DType dtype, size_t rank) {
  require(buffer.count == count,
          rank_text(rank) + "expected " + std::to_string(count) + " elements, got " + std::to_string(buffer.count));
  require(buffer.dtype == dtype,
          rank_text(rank) + "expected dtype " + name_of(dtype) + ", got " + name_of(buffer.dtype));
  require(buffer.pointer != nullptr || count == 0, rank_text(rank) + "the buffer has no memory");
}

void check_buffers(const Buffers& buffers, int64_t count, DType dtype) {
  for (size_t rank = 0; rank < buffers.size(); ++rank) check_buffer(buffers[rank], count, dtype, rank);
}

void check_ranks(const Buffers& in, const Buffers& out) {
  require(!in.empty(), "a collective needs at least one rank");
  require(in.size() == out.size(),
          "one output per rank: " + std::to_string(in.size()) + " inputs, " + std::to_string(out.size()) + " outputs");
}

}  // namespace

void check_all_reduce(const Buffers& in, const Buffers& out) {
  check_ranks(in, out);
  check_buffers(in, in[0].count, in[0].dtype);
  check_buffers(out, in[0].count, in[0].dtype);
}

void check_reduce(const std::vector<ReduceCall>& calls) {
  for (const ReduceCall& call : calls) {
    const auto present = [](const Buffer& buffer) { return buffer.pointer != nullptr; };
    require(std::any_of(call.in.begin(), call.in.end(), present) || (call.out.count == 0 && !call.in.empty()),
            "a sum needs at least one rank that has something to add");
    for (size_t rank = 0; rank < call.in.size(); ++rank)
      if (present(call.in[rank])) check_buffer(call.in[rank], call.out.count, call.out.dtype, rank);
    check_buffer(call.out, call.out.count, call.out.dtype, 0);
  }
}

void check_broadcast(const std::vector<BroadcastCall>& calls) {
  for (const BroadcastCall& call : calls) {
    check_buffer(call.in, call.in.count, call.in.dtype, 0);
    check_buffers(call.out, call.in.count, call.in.dtype);
  }
}

void check_all_gather(const Buffers& in, const Buffers& out) {
  check_ranks(in, out);
  int64_t count = 0;
  for (size_t rank = 0; rank < in.size(); ++rank) {
    check_buffer(in[rank], in[rank].count, in[0].dtype, rank);
    count += in[rank].count;
  }
  check_buffers(out, count, in[0].dtype);
}

void check_reduce_scatter(const Buffers& in, const Buffers& out) {
  check_ranks(in, out);
  const int64_t count = out[0].count;
  check_buffers(out, count, in[0].dtype);
  check_buffers(in, count * static_cast<int64_t>(in.size()), in[0].dtype);
}

}  // namespace mgpu
