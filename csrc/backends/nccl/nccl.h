// The interface of the nccl backend.  It is in every build; NCCL is looked for at its first use.
//
//   open({"/path/of/pip's/libnccl.so.2"});
//   auto team = init(ops, unique_id(), 2, {{0, 0}, {1, 1}}, {});   // world, then {rank, device} of this process
//   NcclCollectives collectives(team);
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/nccl/nccl_collectives.h"
#include "backends/nccl/team.h"

namespace mgpu::nccl {

// Which library is in use and its version, or why there is none; opens nothing.
std::string detail();

// Opens a library, if none is yet, and returns its version: 23007 is 2.30.7.  Throws BackendUnavailable with the
// reason.
int open(const std::vector<std::string>& candidates);
// 0: none is open.
int version();

// Returns a new id, by which the ranks of one team find each other in all their processes.
UniqueId unique_id();
std::shared_ptr<Team> init(DeviceOps& ops, const UniqueId& id, int world, const std::vector<RankDevice>& my_ranks,
                           const Limits& limits);

}  // namespace mgpu::nccl
