#include "backends.h"

#include "backends/cpu/cpu.h"
#include "backends/cuda/cuda.h"
#include "backends/nccl/nccl.h"
#include "core/error.h"
#include "core/peer_collectives.h"
#include "core/transcript.h"

namespace mgpu {
namespace {

// Nothing here is ever destroyed: a thread may still use it while the process ends.

// Transfers between backends copy on the host too.
DeviceOps& host_ops() {
  static auto* host = new WatchedOps(cpu::device_ops());
  return *host;
}

// The interfaces of one backend, made together at first use.
struct Interfaces {
  Interfaces(DeviceOps& backend, const Reach& reach)
      : ops(backend), collectives(ops, reach), transfer(ops, host_ops(), reach) {}
  WatchedOps ops;
  PeerCollectives collectives;
  Transfer transfer;
};

Interfaces& interfaces_of(bool on_host) {
  static auto* host = new Interfaces(cpu::device_ops(), [](int, int) { return true; });
  if (on_host) return *host;
  static auto* gpus = new Interfaces(cuda::device_ops(), cuda::reach);
  return *gpus;
}

Interfaces& interfaces_of(const Streams& streams) {
  require(!streams.empty(), "a team has at least one rank");
  for (const Stream& stream : streams)
    require((stream.device == kHost) == (streams[0].device == kHost),
            "a team of this module is either host memory or GPUs: its streams are of both");
  return interfaces_of(streams[0].device == kHost);
}

}  // namespace

std::vector<Backend> backends() {
  return {{"cpu", true, std::to_string(cpu::num_threads()) + " threads"},
          {"cuda", cuda::built(), cuda::detail()},
          {"nccl", nccl::built(), nccl::detail()}};
}

DeviceOps& device_ops_of(Stream on) { return interfaces_of(on.device == kHost).ops; }
Collectives& collectives_of(const Streams& streams) { return interfaces_of(streams).collectives; }
Transfer& transfer_of(const Streams& streams) { return interfaces_of(streams).transfer; }

int host_threads() { return cpu::num_threads(); }
void set_host_threads(int threads) { cpu::set_num_threads(threads); }

int cuda_device_count() { return cuda::device_count(); }
int cuda_runtime_version() { return cuda::runtime_version(); }
int cuda_driver_version() { return cuda::driver_version(); }
bool cuda_has_code_for(int device) { return cuda::has_code_for(device); }
void cuda_check_memory(const void* pointer, int device, const std::string& name) {
  cuda::require_reachable(pointer, {device, nullptr}, name.c_str());
}
void cuda_allow_peers(const std::vector<std::pair<int, int>>& device_and_peer) { cuda::allow_peers(device_and_peer); }

}  // namespace mgpu
