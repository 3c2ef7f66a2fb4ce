// How the parts of the ranks find each other, and when they are done.
#include <algorithm>

#include "fakes/nccl/fake_state.h"

namespace fake_nccl {
namespace {

void fail_all(Clique& clique, int code) {
  for (Comm* comm : clique.comms)
    if (comm && !comm->gone && comm->async == kOk) comm->async = code;
}

// The oldest collective, if every rank's stream has reached its part.
bool run_next_collective(Clique& clique) {
  std::vector<Part*> parts;
  for (auto& queue : clique.parts) {
    if (queue.empty() || !queue.front()->arrived) return false;
    parts.push_back(queue.front());
  }
  if (!run_collective(parts)) fail_all(clique, kUsage);
  for (auto& queue : clique.parts) {
    queue.front()->done = true;
    queue.pop_front();
  }
  return true;
}

bool run_next_message(Clique& clique) {
  for (auto& [ends, sends] : clique.sends) {
    auto& receives = clique.receives[ends];
    if (sends.empty() || receives.empty() || !sends.front()->arrived || !receives.front()->arrived) continue;
    if (!run_message(*sends.front(), *receives.front())) fail_all(clique, kUsage);
    sends.front()->done = receives.front()->done = true;
    sends.pop_front();
    receives.pop_front();
    return true;
  }
  return false;
}

std::deque<Part*>& queue_of(Clique& clique, int rank, const Part& part) {
  if (part.kind == Kind::send) return clique.sends[{rank, part.root}];
  if (part.kind == Kind::receive) return clique.receives[{part.root, rank}];
  return clique.parts[rank];
}

void remove_part(Clique& clique, int rank, Part* part) {
  auto& queue = queue_of(clique, rank, *part);
  queue.erase(std::remove(queue.begin(), queue.end(), part), queue.end());
}

// Its peers did not come: the communicator has an error from now on, and the stream goes on.
void give_up(Work& work) {
  for (auto& part : work.parts)
    if (!part->done) remove_part(*work.comm->clique, work.comm->rank, part.get());
  work.comm->async = kRemoteError;
}

}  // namespace

// In the order of the calls, which must be every rank's; the streams may get there in any order.
void register_work(Work& work) {
  for (auto& part : work.parts) queue_of(*work.comm->clique, work.comm->rank, *part).push_back(part.get());
}

bool all_done(const Work& work) {
  return std::all_of(work.parts.begin(), work.parts.end(), [](const auto& part) { return part->done; });
}

bool advance(Work& work) {
  if (work.comm->gone || work.comm->aborting) return true;
  const auto held = state().held.find(work.comm->rank);
  if (work.since == Clock::time_point{}) work.since = Clock::now();
  if (held == state().held.end() || !held->second)
    for (auto& part : work.parts) part->arrived = true;
  Clique& clique = *work.comm->clique;
  while (run_next_collective(clique) || run_next_message(clique)) {
  }
  if (all_done(work)) return true;
  if (Clock::now() - work.since < state().timeout) return false;
  give_up(work);
  return true;
}

void drop_work(const Comm& comm) {
  for (auto& queue : {&comm.clique->sends, &comm.clique->receives})
    for (auto& [ends, parts] : *queue)
      if ((queue == &comm.clique->sends ? ends.first : ends.second) == comm.rank) parts.clear();
  comm.clique->parts[comm.rank].clear();
}

void close_device(const Comm& comm) {
  const auto opened = state().opened.find(comm.device);
  if (opened != state().opened.end() && --opened->second.comms == 0) state().opened.erase(opened);
}

}  // namespace fake_nccl
