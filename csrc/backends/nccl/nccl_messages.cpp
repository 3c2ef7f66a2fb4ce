// Messages between ranks: sends and receives in one group, so that none waits for another.
#include <algorithm>
#include <map>

#include "backends/nccl/nccl_collectives.h"
#include "core/buffers.h"
#include "core/error.h"

namespace mgpu::nccl {
namespace {

// Sends and receives between the same two devices are matched in one order: by sender, receiver, index in the list.
Messages sorted(Messages messages, bool sends) {
  const auto ends = [sends](const Message& message) {
    return sends ? std::pair(message.rank, message.peer) : std::pair(message.peer, message.rank);
  };
  std::stable_sort(messages.begin(), messages.end(),
                   [&](const Message& one, const Message& other) { return ends(one) < ends(other); });
  return messages;
}

int64_t elements(const Messages& messages) {
  int64_t count = 0;
  for (const Message& each : messages) count += each.buffer.count;
  return count;
}

void check_ends(const Messages& messages, size_t ranks, int peers) {
  for (const Message& message : messages) {
    require(message.rank >= 0 && static_cast<size_t>(message.rank) < ranks,
            "rank " + std::to_string(message.rank) + " of a message is not in the call");
    require(message.peer >= 0 && message.peer < peers,
            "peer " + std::to_string(message.peer) + " of a message is not in the team");
    require(message.buffer.count == 0 || message.buffer.pointer,
            "rank " + std::to_string(message.rank) + ": a message without memory");
  }
}

// A send that no rank receives would block until the time limit.
void check_pairs(const Messages& sends, const Messages& receives) {
  using Kinds = std::vector<std::pair<int64_t, DType>>;
  std::map<std::pair<int, int>, Kinds> sent, received;
  for (const Message& each : sends) sent[{each.rank, each.peer}].push_back({each.buffer.count, each.buffer.dtype});
  for (const Message& each : receives)
    received[{each.peer, each.rank}].push_back({each.buffer.count, each.buffer.dtype});
  for (const auto* all : {&sent, &received})
    for (const auto& [ends, kinds] : *all)
      require(sent[ends] == received[ends], "what rank " + std::to_string(ends.first) + " sends to rank " +
                                                std::to_string(ends.second) + " is not what that rank receives");
}

void check(const Messages& sends, const Messages& receives, size_t ranks, const Team& team) {
  const int peers = team.whole() ? static_cast<int>(ranks) : team.world();
  check_ends(sends, ranks, peers);
  check_ends(receives, ranks, peers);
  if (team.whole()) check_pairs(sends, receives);
}

// Returns the messages of the ranks of one communicator, without the empty ones.
Messages of_index(const Messages& sorted, const Communicators& communicators, size_t index) {
  Messages mine;
  for (const Message& each : sorted)
    if (communicators.of_rank[each.rank] == index && each.buffer.count) mine.push_back(each);
  return mine;
}

}  // namespace

void NcclCollectives::exchange(const Messages& sends, const Messages& receives, const Streams& streams) {
  team_->check();
  const Communicators communicators = communicators_of(*team_, {streams, true});
  check(sends, receives, streams.size(), *team_);
  if (sends.empty() && receives.empty()) return;
  const auto number_of_peer = [members = team_->ranks(), whole = team_->whole(), communicators](int peer) {
    return whole ? members[communicators.of_rank[peer]].rank : peer;
  };
  const auto parts_of = [&api = team_->api(), sent = sorted(sends, true), received = sorted(receives, false),
                         communicators, number_of_peer](size_t index, Handle communicator, void* stream) {
    Result result = kSuccess;
    for (const Message& each : of_index(sent, communicators, index))
      if (accepted(result))
        result = api.Send(each.buffer.pointer, each.buffer.count, nccl::number_of(each.buffer.dtype),
                          number_of_peer(each.peer), communicator, stream);
    for (const Message& each : of_index(received, communicators, index))
      if (accepted(result))
        result = api.Recv(each.buffer.pointer, each.buffer.count, nccl::number_of(each.buffer.dtype),
                          number_of_peer(each.peer), communicator, stream);
    return result;
  };
  before_leaders(ops_, communicators, streams);
  team_->launch("ncclSend and ncclRecv(" + std::to_string(sends.size()) + " and " + std::to_string(receives.size()) +
                    " messages, " + std::to_string(elements(sends)) + " and " + std::to_string(elements(receives)) +
                    " elements)",
                communicators.leading, parts_of);
  after_leaders(ops_, communicators, streams);
}

}  // namespace mgpu::nccl
