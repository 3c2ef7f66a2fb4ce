// A team over the fake libnccl and several devices in host memory, one rank per entry of a list of devices.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "backends/nccl/nccl.h"
#include "fakes/nccl/host_devices.h"
#include "fakes/nccl/numbers.h"

namespace mgpu::fakes {

inline nccl::Limits short_limits() {
  using std::chrono::milliseconds;
  return {milliseconds(5000), milliseconds(5000), milliseconds(1000)};
}

// Each device once, in ascending order, whatever the order of the ranks.
inline std::vector<nccl::RankDevice> one_rank_per_device(std::vector<int> devices) {
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  std::vector<nccl::RankDevice> ranks;
  for (int device : devices) ranks.push_back({static_cast<int>(ranks.size()), device});
  return ranks;
}

class NcclWorld {
 public:
  explicit NcclWorld(const std::vector<int>& devices, const nccl::Limits& limits = short_limits())
      : NcclWorld(std::make_shared<HostDevices>(), devices, limits) {}
  NcclWorld(std::shared_ptr<HostDevices> host, const std::vector<int>& devices, const nccl::Limits& limits)
      : devices(std::move(host)) {
    const auto ranks = one_rank_per_device(devices);
    team = nccl::init(*this->devices, nccl::unique_id(), static_cast<int>(ranks.size()), ranks, limits);
    collectives = std::make_unique<nccl::NcclCollectives>(team);
    for (int device : devices) streams.push_back(this->devices->new_stream(device));
  }
  size_t size() const { return streams.size(); }
  Ranks ranks() const { return {streams, true}; }
  void finish() { team->wait(streams); }

  std::shared_ptr<HostDevices> devices;
  std::shared_ptr<nccl::Team> team;
  std::unique_ptr<nccl::NcclCollectives> collectives;
  Streams streams;
};

// One Numbers per rank.
struct Memories {
  Memories(size_t ranks, DType dtype, int64_t count) : all(ranks, Numbers(dtype, count)) {}
  template <class Value>
  Memories(size_t ranks, DType dtype, int64_t count, const Value& value) : Memories(ranks, dtype, count) {
    for (size_t rank = 0; rank < ranks; ++rank)
      for (int64_t i = 0; i < count; ++i) all[rank].set(i, value(rank, i));
  }
  Buffers buffers() {
    Buffers result;
    for (Numbers& each : all) result.push_back(each.buffer());
    return result;
  }
  std::vector<Numbers> all;
};

}  // namespace mgpu::fakes
