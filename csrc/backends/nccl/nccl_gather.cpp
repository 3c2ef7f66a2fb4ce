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
  const Places places = places_of(*team_, ranks);
  const bool regular = places.straight() && same_counts(in);
  require_for_all(*team_, out[0].count, in[0].count, regular, "all_gather");
  if (out[0].count == 0) return;
  if (!regular) return gather_by_broadcasts(in, out, places, ranks.streams);
  const int dtype = nccl::number_of(in[0].dtype);
  team_->launch(call_text("ncclAllGather", in[0].count, in[0].dtype), places.leading,
                [&api = team_->api(), in, out, dtype](size_t rank, Handle communicator, void* stream) {
                  return api.AllGather(in[rank].pointer, out[rank].pointer, in[rank].count, dtype, communicator,
                                       stream);
                });
}

// Each rank's part is a broadcast from its device into the place where it belongs, all in one group.
void NcclCollectives::gather_by_broadcasts(const Buffers& in, const Buffers& out, const Places& places,
                                           const Streams& streams) {
  before_leaders(ops_, places, streams);
  const auto parts_of = [&api = team_->api(), members = team_->ranks(), places, in, out](
                            size_t place, Handle communicator, void* stream) {
    Result result = kSuccess;
    int64_t begin = 0;
    for (size_t rank = 0; rank < in.size() && accepted(result); ++rank) {
      const Buffer to = slice(out[places.leader(place)], {begin, in[rank].count});
      const Buffer& from = places.of_rank[rank] == place ? in[rank] : to;
      if (to.count)
        result = api.Broadcast(from.pointer, to.pointer, to.count, nccl::number_of(to.dtype),
                               members[places.of_rank[rank]].rank, communicator, stream);
      begin += in[rank].count;
    }
    return result;
  };
  const std::string what =
      call_text("ncclBroadcast", out[0].count, out[0].dtype, "all_gather of " + std::to_string(in.size()) + " ranks");
  team_->launch(what, places.leading, parts_of);
  after_leaders(ops_, places, streams);
  copy_to_members({{{nullptr, out[0].count, out[0].dtype}, out}}, places, streams);
  before_leaders(ops_, places, streams);
}

void NcclCollectives::reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op, const Ranks& ranks) {
  team_->check();
  const Places places = places_of(*team_, ranks);
  require_for_all(*team_, in[0].count, out[0].count, places.straight(), "reduce_scatter");
  if (out[0].count == 0) return;
  if (!places.straight()) {
    before_leaders(ops_, places, ranks.streams);
    scatter_by_reductions(in, out, op, places);
    return after_leaders(ops_, places, ranks.streams);
  }
  const Reduction reduction = reduction_of(op, in[0].dtype, static_cast<size_t>(team_->world()));
  const int dtype = nccl::number_of(in[0].dtype);
  team_->launch(call_text("ncclReduceScatter", out[0].count, out[0].dtype, name_of(op)), places.leading,
                [&api = team_->api(), in, out, dtype, reduction](size_t rank, Handle communicator, void* stream) {
                  return api.ReduceScatter(in[rank].pointer, out[rank].pointer, out[rank].count, dtype, reduction.op,
                                           communicator, stream);
                });
  for (size_t rank = 0; rank < out.size(); ++rank) divide(out[rank], reduction, ranks.streams[rank]);
}

// One reduction per chunk, to the device of the rank whose chunk it is, all in one group.
void NcclCollectives::scatter_by_reductions(const Buffers& in, const Buffers& out, ReduceOp op, const Places& places) {
  Scratch scratch(ops_, places.leading);
  Buffers parts;
  for (size_t place = 0; place < places.ranks.size(); ++place)
    parts.push_back(combined(in, places.ranks[place], op, places.leading[place], nullptr, scratch));
  const int64_t count = out[0].count;
  const Reduction reduction = reduction_of(op, in[0].dtype, in.size());
  const auto parts_of = [&api = team_->api(), members = team_->ranks(), places, parts, out, count, reduction](
                            size_t place, Handle communicator, void* stream) {
    Result result = kSuccess;
    for (size_t rank = 0; rank < out.size() && accepted(result); ++rank) {
      const Buffer chunk = slice(parts[place], {static_cast<int64_t>(rank) * count, count});
      void* to = places.of_rank[rank] == place ? out[rank].pointer : nullptr;
      result = api.Reduce(chunk.pointer, to, count, nccl::number_of(chunk.dtype), reduction.op,
                          members[places.of_rank[rank]].rank, communicator, stream);
    }
    return result;
  };
  const std::string more = std::string(name_of(op)) + ", reduce_scatter of " + std::to_string(out.size()) + " ranks";
  team_->launch(call_text("ncclReduce", count, out[0].dtype, more), places.leading, parts_of);
  for (size_t rank = 0; rank < out.size(); ++rank) divide(out[rank], reduction, places.leading[places.of_rank[rank]]);
}

NcclCollectives::Root NcclCollectives::root_of(int rank) const {
  require(rank >= 0 && rank < team_->world(), "root " + std::to_string(rank) + " is not in the team");
  for (size_t place = 0; place < team_->ranks().size(); ++place)
    if (number_of(place) == rank) return {rank, static_cast<int>(place)};
  return {rank, -1};
}

void NcclCollectives::reduce_to(int root, const Buffers& in, const Buffer& out, ReduceOp op, const Streams& streams) {
  team_->check();
  const Places places = places_of(*team_, {streams, true});
  const Root at = root_of(root);
  require(places.straight(), "reduce_to takes one rank per device, in the team's order");
  require(in[0].count == 0 || at.place < 0 || out.pointer, "the root's buffer has no memory");
  const std::vector<ReduceCall> calls{{in, {out.pointer, in[0].count, in[0].dtype}}};
  require_for_all(*team_, in[0].count * team_->world(), in[0].count, same_counts(in), "reduce_to");
  if (in[0].count) reduce_at(calls, op, places, at);
}

void NcclCollectives::broadcast_from(int root, const Buffers& inout, const Streams& streams) {
  team_->check();
  const Places places = places_of(*team_, {streams, true});
  const Root at = root_of(root);
  require(places.straight(), "broadcast_from takes one rank per device, in the team's order");
  require_for_all(*team_, inout[0].count * team_->world(), inout[0].count, same_counts(inout), "broadcast_from");
  const Buffer& source = inout[at.place < 0 ? 0 : at.place];
  if (source.count) broadcast_at({{source, inout}}, places, streams, at);
}

}  // namespace mgpu::nccl
