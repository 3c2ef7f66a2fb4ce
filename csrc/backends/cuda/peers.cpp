// Which devices touch each other's memory, and what a pointer belongs to.
#include <array>
#include <atomic>

#include "backends/cuda/check.h"
#include "backends/cuda/cuda.h"
#include "backends/cuda/guard.h"

namespace mgpu::cuda {
namespace {

constexpr int kMostDevices = 64;
std::array<std::atomic<uint64_t>, kMostDevices> peers_of{};  // a bit per peer

bool in_range(int device) { return device >= 0 && device < kMostDevices; }

void enable(int device, int peer) {
  int capable = 0;
  check(cudaDeviceCanAccessPeer(&capable, device, peer), "cudaDeviceCanAccessPeer");
  require(capable, "device " + std::to_string(device) + " cannot access device " + std::to_string(peer));
  const DeviceGuard guard(device);
  const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();  // torch did it
  else
    check(code, "cudaDeviceEnablePeerAccess");
}

}  // namespace

bool reach(int device, int peer) {
  if (device == peer) return true;
  return in_range(device) && in_range(peer) && (peers_of[device].load() >> peer & 1) != 0;
}

void allow_peers(const std::vector<std::pair<int, int>>& device_and_peer) {
  for (const auto& [device, peer] : device_and_peer)
    require(in_range(device) && in_range(peer) && device != peer,
            "peers are two devices of up to " + std::to_string(kMostDevices));
  for (const auto& [device, peer] : device_and_peer) enable(device, peer);
  for (const auto& [device, peer] : device_and_peer) peers_of[device].fetch_or(uint64_t{1} << peer);
}

void check_memory(const void* pointer, int device, const std::string& name) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  const std::string where = name + ": the memory must be of device " + std::to_string(device);
  switch (attributes.type) {
    case cudaMemoryTypeUnregistered:
      throw InvalidArgument(where + ", and is ordinary host memory");
    case cudaMemoryTypeDevice:
      require(reach(device, attributes.device),
              where + ", and is of device " + std::to_string(attributes.device) + ", which it does not reach");
      return;
    default:  // pinned or managed: every device reaches it
      return;
  }
}

}  // namespace mgpu::cuda
