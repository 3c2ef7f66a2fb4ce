#include "backends/nccl/communicators.h"

#include <string>

#include "core/buffers.h"
#include "core/error.h"
#include "core/merged.h"

namespace mgpu::nccl {
namespace {

bool one_each(const Team& team, const Streams& streams) {
  bool same = streams.size() == team.ranks().size();
  for (size_t rank = 0; same && rank < streams.size(); ++rank)
    same = !streams[rank].on_host() && streams[rank].device == team.ranks()[rank].device;
  return same;
}

// Returns the index of the first communicator on the stream's device; their count where there is none.
size_t index_on(const Team& team, Stream stream) {
  size_t index = stream.on_host() ? team.ranks().size() : 0;
  while (index < team.ranks().size() && team.ranks()[index].device != stream.device) ++index;
  return index;
}

std::string device_text(Stream stream) {
  return stream.on_host() ? "in host memory" : "on device " + std::to_string(stream.device);
}

void require_mergeable(const Team& team, const Ranks& ranks) {
  if (!share_devices(ranks.streams)) return;
  if (!ranks.merge_shared_devices)
    throw BackendUnavailable("NCCL sees each GPU once: ranks that share one must be merged there first");
  if (!team.whole()) throw BackendUnavailable("ranks that share a device need all ranks of the team in this process");
}

}  // namespace

bool Communicators::one_per_rank() const {
  for (size_t rank = 0; rank < of_rank.size(); ++rank)
    if (of_rank[rank] != rank) return false;
  return of_rank.size() == ranks.size();
}

Communicators communicators_of(const Team& team, const Ranks& ranks) {
  const bool one_per_rank = one_each(team, ranks.streams);
  if (!one_per_rank) require_mergeable(team, ranks);
  Communicators communicators{{}, std::vector<std::vector<size_t>>(team.ranks().size()), Streams(team.ranks().size())};
  for (size_t rank = 0; rank < ranks.streams.size(); ++rank) {
    const size_t index = one_per_rank ? rank : index_on(team, ranks.streams[rank]);
    require(index < team.ranks().size(),
            "rank " + std::to_string(rank) + " is " + device_text(ranks.streams[rank]) + ", where the team has none");
    if (communicators.ranks[index].empty()) communicators.leading[index] = ranks.streams[rank];
    communicators.of_rank.push_back(index);
    communicators.ranks[index].push_back(rank);
  }
  for (size_t index = 0; index < communicators.ranks.size(); ++index)
    require(!communicators.ranks[index].empty(),
            "rank " + std::to_string(team.ranks()[index].rank) + " of the team, device " +
                std::to_string(team.ranks()[index].device) + ", has no part in the call");
  return communicators;
}

size_t index_of_root(const Team& team, const Communicators& communicators, Stream root) {
  for (size_t index = 0; index < communicators.leading.size(); ++index)
    if (communicators.leading[index] == root) return index;
  const size_t index = index_on(team, root);
  if (index == team.ranks().size())
    throw BackendUnavailable("the root is " + device_text(root) + ", where no rank of NCCL's team is");
  return index;
}

void before_leaders(DeviceOps& ops, const Communicators& communicators, const Streams& streams) {
  for (size_t rank = 0; rank < streams.size(); ++rank)
    order(ops, streams[rank], communicators.leading[communicators.of_rank[rank]]);
}

void after_leaders(DeviceOps& ops, const Communicators& communicators, const Streams& streams) {
  for (size_t rank = 0; rank < streams.size(); ++rank)
    order(ops, communicators.leading[communicators.of_rank[rank]], streams[rank]);
}

Buffer Scratch::allocate(int64_t count, DType dtype) {
  memory_.push_back(ops_.staging(count * static_cast<int64_t>(itemsize(dtype)), streams_));
  return {memory_.back().get(), count, dtype};
}

// Also when the call has failed half way: work that is on the streams already still reads the memory.
Scratch::~Scratch() {
  try {
    for (const Stream& stream : distinct(streams_))
      for (const auto& memory : memory_) ops_.keep(stream, memory);
  } catch (const std::exception&) {  // the devices have failed; nothing runs there any more
  }
}

}  // namespace mgpu::nccl
