// All-reduce, reduce and broadcast.
#include "backends/nccl/nccl_collectives.h"

#include <algorithm>

#include "core/buffers.h"
#include "core/error.h"
#include "core/merged.h"

namespace mgpu::nccl {
namespace {

// The members that have something to add.
std::vector<size_t> present(const Buffers& in, const std::vector<size_t>& members) {
  std::vector<size_t> result;
  for (size_t rank : members)
    if (in[rank].pointer) result.push_back(rank);
  return result;
}

size_t count_present(const Buffers& in) {
  return std::count_if(in.begin(), in.end(), [](const Buffer& buffer) { return buffer.pointer != nullptr; });
}

void require_part_from_each(const std::vector<ReduceCall>& calls, const Communicators& communicators) {
  for (const ReduceCall& call : calls)
    for (const auto& members : communicators.ranks)
      if (call.out.count && present(call.in, members).empty())
        throw BackendUnavailable("NCCL needs a part from each device: rank " + std::to_string(members[0]) +
                                 " has nothing to add");
}

template <class Calls>
std::string batch_text(const char* name, const Calls& calls, const std::string& more,
                       Buffer Calls::value_type::* whole) {
  int64_t count = 0;
  for (const auto& call : calls) count += (call.*whole).count;
  const std::string tensors = calls.size() == 1 ? "" : std::to_string(calls.size()) + " tensors";
  return call_text(name, count, (calls[0].*whole).dtype,
                   tensors + (tensors.empty() || more.empty() ? "" : ", ") + more);
}

}  // namespace

std::string call_text(const char* name, int64_t count, DType dtype, const std::string& more) {
  return std::string(name) + "(count " + std::to_string(count) + ", " + name_of(dtype) +
         (more.empty() ? "" : ", " + more) + ")";
}

// NCCL divides by its communicators, which are not the ranks where some share a device; and not all its versions round
// an integer's average toward zero.  So these are sums, divided here.
NcclCollectives::Reduction NcclCollectives::reduction_of(ReduceOp op, DType dtype, size_t parts) const {
  if (op != ReduceOp::avg) return {nccl::number_of(op), 1};
  if (is_floating(dtype) && static_cast<int>(parts) == team_->world()) return {kAvg, 1};
  return {kSum, static_cast<int>(parts)};
}

void NcclCollectives::divide(const Buffer& buffer, const Reduction& reduction, Stream on) {
  if (reduction.divisor > 1) ops_.sum_ranks({sum_of({buffer}, {buffer}, ReduceOp::avg, reduction.divisor)}, on);
}

void NcclCollectives::all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, Algorithm algorithm,
                                 const Ranks& ranks) {
  if (algorithm != Algorithm::nccl && algorithm != Algorithm::automatic)
    throw BackendUnavailable(std::string("the nccl backend has no algorithm '") + name_of(algorithm) + "', only nccl");
  team_->check();
  const Communicators communicators = communicators_of(*team_, ranks);
  if (in[0].count == 0) return;
  if (communicators.leading.size() == in.size()) {
    const size_t parts = team_->whole() ? in.size() : static_cast<size_t>(team_->world());
    return all_reduce_each(in, out, op, parts, ranks.streams);
  }
  merged_all_reduce(ops_, in, out, op, ranks.streams, [&](const Buffers& inout, const Streams& leading) {
    all_reduce_each(inout, inout, op, in.size(), leading);
  });
}

// One rank per communicator; `parts` is how many were added up to get there.
void NcclCollectives::all_reduce_each(const Buffers& in, const Buffers& out, ReduceOp op, size_t parts,
                                      const Streams& streams) {
  const Communicators communicators = communicators_of(*team_, {streams, true});
  const Reduction reduction = reduction_of(op, in[0].dtype, parts);
  const int dtype = nccl::number_of(in[0].dtype);
  team_->launch(
      call_text("ncclAllReduce", in[0].count, in[0].dtype, name_of(op)), communicators.leading,
      [&api = team_->api(), communicators, in, out, dtype, reduction](size_t index, Handle communicator, void* stream) {
        const size_t rank = communicators.leader(index);
        return api.AllReduce(in[rank].pointer, out[rank].pointer, in[rank].count, dtype, reduction.op, communicator,
                             stream);
      });
  for (size_t rank = 0; rank < out.size(); ++rank) divide(out[rank], reduction, streams[rank]);
}

// Returns what a device gives to NCCL: its only member's own memory, otherwise the members' sum, which is written to
// `into`, or to scratch memory where `into` is null.
Buffer NcclCollectives::combined(const Buffers& in, const std::vector<size_t>& members, ReduceOp op, Stream on,
                                 const Buffer* into, Scratch& scratch) {
  const std::vector<size_t> adding = present(in, members);
  if (adding.size() == 1) return in[adding[0]];
  Buffers parts;
  for (size_t rank : adding) parts.push_back(in[rank]);
  const Buffer sum = into ? *into : scratch.allocate(parts[0].count, parts[0].dtype);
  ops_.sum_ranks({sum_of(parts, {sum}, op, 1)}, on);
  return sum;
}

void NcclCollectives::reduce(const std::vector<ReduceCall>& calls, ReduceOp op, const Ranks& ranks, Stream root) {
  team_->check();
  const Communicators communicators = communicators_of(*team_, ranks);
  const size_t index = index_of_root(*team_, communicators, root);
  std::vector<ReduceCall> sums;
  for (const ReduceCall& call : calls)
    if (call.out.count) sums.push_back(call);
  require_part_from_each(sums, communicators);
  if (sums.empty()) return;
  before_leaders(ops_, communicators, ranks.streams);
  order(ops_, root, communicators.leading[index]);
  reduce_at(sums, op, communicators, {number_of(index), static_cast<int>(index)});
  order(ops_, communicators.leading[index], root);
  after_leaders(ops_, communicators, ranks.streams);  // until then the inputs are read
}

void NcclCollectives::reduce_at(const std::vector<ReduceCall>& calls, ReduceOp op, const Communicators& communicators,
                                Root root) {
  Scratch scratch(ops_, communicators.leading);
  std::vector<Buffers> parts;  // of each call, one per communicator
  std::vector<Reduction> reductions;
  for (const ReduceCall& call : calls) {
    const size_t added = team_->whole() ? count_present(call.in) : static_cast<size_t>(team_->world());
    reductions.push_back(reduction_of(op, call.out.dtype, added));
    parts.emplace_back();
    for (size_t index = 0; index < communicators.ranks.size(); ++index)
      parts.back().push_back(combined(call.in, communicators.ranks[index], op, communicators.leading[index],
                                      static_cast<int>(index) == root.index ? &call.out : nullptr, scratch));
  }
  team_->launch(batch_text("ncclReduce", calls, name_of(op), &ReduceCall::out), communicators.leading,
                [&api = team_->api(), calls, parts, reductions, root](size_t index, Handle communicator, void* stream) {
                  Result result = kSuccess;
                  for (size_t i = 0; i < calls.size() && accepted(result); ++i) {
                    const Buffer& part = parts[i][index];
                    void* out = static_cast<int>(index) == root.index ? calls[i].out.pointer : nullptr;
                    result = api.Reduce(part.pointer, out, part.count, nccl::number_of(part.dtype), reductions[i].op,
                                        root.rank, communicator, stream);
                  }
                  return result;
                });
  if (root.index < 0) return;
  for (size_t i = 0; i < calls.size(); ++i) divide(calls[i].out, reductions[i], communicators.leading[root.index]);
}

void NcclCollectives::broadcast(const std::vector<BroadcastCall>& calls, Stream root, const Ranks& ranks) {
  team_->check();
  const Communicators communicators = communicators_of(*team_, ranks);
  const size_t index = index_of_root(*team_, communicators, root);
  std::vector<BroadcastCall> copies;
  for (const BroadcastCall& call : calls)
    if (call.in.count) copies.push_back(call);
  if (copies.empty()) return;
  // Each stream writes its own memory, so there is nobody else to wait for.
  order(ops_, root, communicators.leading[index]);
  broadcast_at(copies, communicators, ranks.streams, {number_of(index), static_cast<int>(index)});
  order(ops_, communicators.leading[index], root);
}

void NcclCollectives::broadcast_at(const std::vector<BroadcastCall>& calls, const Communicators& communicators,
                                   const Streams& streams, Root root) {
  team_->launch(batch_text("ncclBroadcast", calls, "", &BroadcastCall::in), communicators.leading,
                [&api = team_->api(), calls, communicators, root](size_t index, Handle communicator, void* stream) {
                  Result result = kSuccess;
                  for (size_t i = 0; i < calls.size() && accepted(result); ++i) {
                    const Buffer& out = calls[i].out[communicators.leader(index)];
                    const Buffer& in = static_cast<int>(index) == root.index ? calls[i].in : out;
                    result = api.Broadcast(in.pointer, out.pointer, out.count, nccl::number_of(out.dtype), root.rank,
                                           communicator, stream);
                  }
                  return result;
                });
  after_leaders(ops_, communicators, streams);
  copy_to_members(calls, communicators, streams);
  before_leaders(ops_, communicators, streams);  // a leader may overwrite what it has when its members have read it
}

// A copy that is the source itself is left alone.
void NcclCollectives::copy_to_members(const std::vector<BroadcastCall>& calls, const Communicators& communicators,
                                      const Streams& streams) {
  PerStream<CopyBlock> copies;
  for (const BroadcastCall& call : calls)
    for (size_t rank = 0; rank < streams.size(); ++rank) {
      const Buffer& from = call.out[communicators.leader(communicators.of_rank[rank])];
      void* to = call.out[rank].pointer;
      if (to != from.pointer && to != call.in.pointer)
        copies.add(streams[rank], plain_copy(to, from.pointer, nbytes_of(from)));
    }
  for (const auto& [stream, blocks] : copies.all()) ops_.copy(blocks, stream);
}

}  // namespace mgpu::nccl
