// All-gather and reduce-scatter, and the collectives whose root may be in another process.
#include <algorithm>

#include "backends/nccl/nccl_collectives.h"
#include "core/buffers.h"
#include "core/error.h"

namespace mgpu::nccl {
namespace {

bool same_counts(const Buffers& buffers) {
  return std::all_of(buffers.begin(), buffers.end(),
                     [&](const Buffer& buffer) { return buffer.count == buffers[0].count; });
}

// Ranks of other processes have buffers that nobody here can see.
void require_for_all(const Team& team, int64_t whole, int64_t part, bool regular, const char* name) {
  if (team.whole()) return;
  require(regular && whole == part * team.world(),
          std::string(name) + " of a team with ranks in other processes needs the same count on every rank: " +
              std::to_string(whole) + " is not " + std::to_string(team.world()) + " times " + std::to_string(part));
}

}  // namespace

void NcclCollectives::all_gather(const Buffers& in, const Buffers& out, const Ranks& ranks) {
  team_->check();
  const Communicators communicators = communicators_of(*team_, ranks);
  const bool regular = communicators.one_per_rank() && same_counts(in);
  require_for_all(*team_, out[0].count, in[0].count, regular, "all_gather");
  if (out[0].count == 0) return;
  if (!regular) return gather_by_broadcasts(in, out, communicators, ranks.streams);
  const int dtype = nccl::number_of(in[0].dtype);
  team_->launch(call_text("ncclAllGather", in[0].count, in[0].dtype), communicators.leading,
                [&api = team_->api(), in, out, dtype](size_t rank, Handle communicator, void* stream) {
                  return api.AllGather(in[rank].pointer, out[rank].pointer, in[rank].count, dtype, communicator,
                                       stream);
                });
}

// Each rank's part is a broadcast from its device into the part of the output where it belongs, all in one group.
void NcclCollectives::gather_by_broadcasts(const Buffers& in, const Buffers& out, const Communicators& communicators,
                                           const Streams& streams) {
  before_leaders(ops_, communicators, streams);
  const auto parts_of = [&api = team_->api(), members = team_->ranks(), communicators, in, out](
                            size_t index, Handle communicator, void* stream) {
    Result result = kSuccess;
    int64_t begin = 0;
    for (size_t rank = 0; rank < in.size() && accepted(result); ++rank) {
      const Buffer to = slice(out[communicators.leader(index)], {begin, in[rank].count});
      const Buffer& from = communicators.of_rank[rank] == index ? in[rank] : to;
      if (to.count)
        result = api.Broadcast(from.pointer, to.pointer, to.count, nccl::number_of(to.dtype),
                               members[communicators.of_rank[rank]].rank, communicator, stream);
      begin += in[rank].count;
    }
    return result;
  };
  const std::string what =
      call_text("ncclBroadcast", out[0].count, out[0].dtype, "all_gather of " + std::to_string(in.size()) + " ranks");
  team_->launch(what, communicators.leading, parts_of);
  after_leaders(ops_, communicators, streams);
  copy_to_members({{{nullptr, out[0].count, out[0].dtype}, out}}, communicators, streams);
  before_leaders(ops_, communicators, streams);
}

void NcclCollectives::reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op, const Ranks& ranks) {
  team_->check();
  const Communicators communicators = communicators_of(*team_, ranks);
  require_for_all(*team_, in[0].count, out[0].count, communicators.one_per_rank(), "reduce_scatter");
  if (out[0].count == 0) return;
  if (!communicators.one_per_rank()) {
    before_leaders(ops_, communicators, ranks.streams);
    scatter_by_reductions(in, out, op, communicators);
    return after_leaders(ops_, communicators, ranks.streams);
  }
  const Reduction reduction = reduction_of(op, in[0].dtype, static_cast<size_t>(team_->world()));
  const int dtype = nccl::number_of(in[0].dtype);
  team_->launch(call_text("ncclReduceScatter", out[0].count, out[0].dtype, name_of(op)), communicators.leading,
                [&api = team_->api(), in, out, dtype, reduction](size_t rank, Handle communicator, void* stream) {
                  return api.ReduceScatter(in[rank].pointer, out[rank].pointer, out[rank].count, dtype, reduction.op,
                                           communicator, stream);
                });
  for (size_t rank = 0; rank < out.size(); ++rank) divide(out[rank], reduction, ranks.streams[rank]);
}

// One reduction per chunk, to the device of the rank whose chunk it is, all in one group.
void NcclCollectives::scatter_by_reductions(const Buffers& in, const Buffers& out, ReduceOp op,
                                            const Communicators& communicators) {
  Scratch scratch(ops_, communicators.leading);
  Buffers parts;
  for (size_t index = 0; index < communicators.ranks.size(); ++index)
    parts.push_back(combined(in, communicators.ranks[index], op, communicators.leading[index], nullptr, scratch));
  const int64_t count = out[0].count;
  const Reduction reduction = reduction_of(op, in[0].dtype, in.size());
  const auto parts_of = [&api = team_->api(), members = team_->ranks(), communicators, parts, out, count, reduction](
                            size_t index, Handle communicator, void* stream) {
    Result result = kSuccess;
    for (size_t rank = 0; rank < out.size() && accepted(result); ++rank) {
      const Buffer chunk = slice(parts[index], {static_cast<int64_t>(rank) * count, count});
      void* to = communicators.of_rank[rank] == index ? out[rank].pointer : nullptr;
      result = api.Reduce(chunk.pointer, to, count, nccl::number_of(chunk.dtype), reduction.op,
                          members[communicators.of_rank[rank]].rank, communicator, stream);
    }
    return result;
  };
  const std::string more = std::string(name_of(op)) + ", reduce_scatter of " + std::to_string(out.size()) + " ranks";
  team_->launch(call_text("ncclReduce", count, out[0].dtype, more), communicators.leading, parts_of);
  for (size_t rank = 0; rank < out.size(); ++rank)
    divide(out[rank], reduction, communicators.leading[communicators.of_rank[rank]]);
}

NcclCollectives::Root NcclCollectives::root_of(int rank) const {
  require(rank >= 0 && rank < team_->world(), "root " + std::to_string(rank) + " is not in the team");
  for (size_t index = 0; index < team_->ranks().size(); ++index)
    if (number_of(index) == rank) return {rank, static_cast<int>(index)};
  return {rank, -1};
}

void NcclCollectives::reduce_to(int root, const Buffers& in, const Buffer& out, ReduceOp op, const Streams& streams) {
  team_->check();
  const Communicators communicators = communicators_of(*team_, {streams, true});
  const Root at = root_of(root);
  require(communicators.one_per_rank(), "reduce_to takes one rank per device, in the team's order");
  require(in[0].count == 0 || at.index < 0 || out.pointer, "the root's buffer has no memory");
  const std::vector<ReduceCall> calls{{in, {out.pointer, in[0].count, in[0].dtype}}};
  require_for_all(*team_, in[0].count * team_->world(), in[0].count, same_counts(in), "reduce_to");
  if (in[0].count) reduce_at(calls, op, communicators, at);
}

void NcclCollectives::broadcast_from(int root, const Buffers& inout, const Streams& streams) {
  team_->check();
  const Communicators communicators = communicators_of(*team_, {streams, true});
  const Root at = root_of(root);
  require(communicators.one_per_rank(), "broadcast_from takes one rank per device, in the team's order");
  require_for_all(*team_, inout[0].count * team_->world(), inout[0].count, same_counts(inout), "broadcast_from");
  const Buffer& source = inout[at.index < 0 ? 0 : at.index];
  if (source.count) broadcast_at({{source, inout}}, communicators, streams, at);
}

}  // namespace mgpu::nccl
