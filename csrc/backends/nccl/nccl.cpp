#include "backends/nccl/nccl.h"

#include "backends/nccl/nccl_library.h"
#include "core/error.h"

namespace mgpu::nccl {

std::string detail() { return library_detail(); }

int open(const std::vector<std::string>& candidates) { return open_library(candidates).version; }

int version() {
  const Library* library = opened_library();
  return library ? library->version : 0;
}

UniqueId unique_id() {
  const Library& library = open_library();
  UniqueId id{};
  const Result result = library.api.GetUniqueId(&id);
  if (result == kSuccess) return id;
  throw NcclError(std::string("ncclGetUniqueId failed: ") + library.api.GetErrorString(result) + " (NCCL error " +
                      std::to_string(result) + "): " + library.api.GetLastError(nullptr),
                  result);
}

std::shared_ptr<Team> init(DeviceOps& ops, const UniqueId& id, int world, const std::vector<RankDevice>& my_ranks,
                           const Limits& limits) {
  return Team::init(ops, id, world, my_ranks, limits);
}

}  // namespace mgpu::nccl
