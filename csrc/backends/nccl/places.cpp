#include "backends/nccl/places.h"

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

// The first place of the stream's device; as many as there are places if the team has none there.
size_t place_on(const Team& team, Stream stream) {
  size_t place = stream.on_host() ? team.ranks().size() : 0;
  while (place < team.ranks().size() && team.ranks()[place].device != stream.device) ++place;
  return place;
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

bool Places::straight() const {
  for (size_t rank = 0; rank < of_rank.size(); ++rank)
    if (of_rank[rank] != rank) return false;
  return of_rank.size() == ranks.size();
}

Places places_of(const Team& team, const Ranks& ranks) {
  const bool straight = one_each(team, ranks.streams);
  if (!straight) require_mergeable(team, ranks);
  Places places{{}, std::vector<std::vector<size_t>>(team.ranks().size()), Streams(team.ranks().size())};
  for (size_t rank = 0; rank < ranks.streams.size(); ++rank) {
    const size_t place = straight ? rank : place_on(team, ranks.streams[rank]);
    require(place < team.ranks().size(),
            "rank " + std::to_string(rank) + " is " + device_text(ranks.streams[rank]) + ", where the team has none");
    if (places.ranks[place].empty()) places.leading[place] = ranks.streams[rank];
    places.of_rank.push_back(place);
    places.ranks[place].push_back(rank);
  }
  for (size_t place = 0; place < places.ranks.size(); ++place)
    require(!places.ranks[place].empty(), "rank " + std::to_string(team.ranks()[place].rank) + " of the team, device " +
                                              std::to_string(team.ranks()[place].device) + ", has no part in the call");
  return places;
}

size_t place_of_root(const Team& team, const Places& places, Stream root) {
  for (size_t place = 0; place < places.leading.size(); ++place)
    if (places.leading[place] == root) return place;
  const size_t place = place_on(team, root);
  if (place == team.ranks().size())
    throw BackendUnavailable("the root is " + device_text(root) + ", where no rank of NCCL's team is");
  return place;
}

void before_leaders(DeviceOps& ops, const Places& places, const Streams& streams) {
  for (size_t rank = 0; rank < streams.size(); ++rank) order(ops, streams[rank], places.leading[places.of_rank[rank]]);
}

void after_leaders(DeviceOps& ops, const Places& places, const Streams& streams) {
  for (size_t rank = 0; rank < streams.size(); ++rank) order(ops, places.leading[places.of_rank[rank]], streams[rank]);
}

Buffer Scratch::room(int64_t count, DType dtype) {
  memory_.push_back(ops_.staging(count * static_cast<int64_t>(itemsize(dtype)), streams_));
  return {memory_.back().get(), count, dtype};
}

// Also when the call has failed half way: then it is read by what was put on the streams before.
Scratch::~Scratch() {
  try {
    for (const Stream& stream : distinct(streams_))
      for (const auto& memory : memory_) ops_.keep(stream, memory);
  } catch (const std::exception&) {  // the devices have failed; nothing runs there any more
  }
}

}  // namespace mgpu::nccl
