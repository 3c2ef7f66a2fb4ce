// The start of a team: checks of its ranks, and the call in which all ranks meet.
#include <cstdlib>
#include <set>
#include <string>

#include "backends/nccl/team.h"
#include "core/error.h"

namespace mgpu::nccl {
namespace {

// NCCL takes several ranks on one GPU since 2.30, and only if it is told to.
bool devices_may_be_shared(int version) {
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return version >= 23000 && enabled && std::string(enabled) == "1";
}

void check_ranks(int world, const std::vector<RankDevice>& ranks) {
  require(world >= 1, "a team has at least one rank, not " + std::to_string(world));
  require(!ranks.empty(), "this process needs at least one rank of the team");
  std::set<int> seen;
  for (const RankDevice& each : ranks) {
    require(each.rank >= 0 && each.rank < world,
            "rank " + std::to_string(each.rank) + " is not in a team of " + std::to_string(world) + " ranks");
    require(seen.insert(each.rank).second, "rank " + std::to_string(each.rank) + " is there twice");
    require(each.device >= 0,
            "rank " + std::to_string(each.rank) + " is on device " + std::to_string(each.device) + ", which is no GPU");
  }
}

void check_devices(const std::vector<RankDevice>& ranks, int version) {
  if (devices_may_be_shared(version)) return;
  for (size_t i = 0; i < ranks.size(); ++i)
    for (size_t k = 0; k < i; ++k)
      require(ranks[i].device != ranks[k].device,
              "ranks " + std::to_string(ranks[k].rank) + " and " + std::to_string(ranks[i].rank) +
                  " are both on device " + std::to_string(ranks[i].device) +
                  ": NCCL sees each GPU once (2.30 takes more with NCCL_MULTI_RANK_GPU_ENABLE=1)");
}

}  // namespace

std::shared_ptr<Team> Team::init(DeviceOps& ops, const UniqueId& id, int world, const std::vector<RankDevice>& my_ranks,
                                 const Limits& limits) {
  check_ranks(world, my_ranks);
  const Library& library = open_library();
  check_devices(my_ranks, library.version);
  const std::shared_ptr<Team> team(new Team(ops, library, world, my_ranks, limits));
  team->make_communicators(id);
  if (limits.collective.count() > 0) watch(*team);
  return team;
}

// All in one group, otherwise the first would wait for the second for ever.  No device is claimed while they meet:
// other ranks may be other threads', and NCCL launches nothing meanwhile.
void Team::make_communicators(const UniqueId& id) {
  const std::string what = "ncclCommInitRankConfig of " + std::to_string(world_) + " ranks";
  handles_.assign(ranks_.size(), nullptr);
  const Done done = run_group(what, false, [calls = calls(), world = world_, id](size_t index, Handle& handle) {
    const RankDevice& mine = calls.ranks[index];
    const auto current = calls.ops.make_current(mine.device);  // a communicator is made for the current device
    Config config;
    return calls.api.CommInitRankConfig(&handle, world, id, mine.rank, &config);
  });
  if (!accepted(done.result)) fail(text_of(what, done.failed, done.result, done.error), done.result);
}

}  // namespace mgpu::nccl
