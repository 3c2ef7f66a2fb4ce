// The cuda backend on the fake runtime as a world of the conformance suites: one rank per entry of a list of devices.
#pragma once

#include "backends/cuda/cuda.h"
#include "backends/cuda/guard.h"
#include "conformance.h"
#include "cuda_runtime.h"
#include "fakes/cuda/fake_cuda.h"
#include "fakes/ptx/launches.h"

inline cudaStream_t new_stream(int device) {
  const mgpu::cuda::DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

class CudaWorld final : public World {
 public:
  CudaWorld(uint64_t seed, const std::vector<int>& devices)
      : collectives_(mgpu::cuda::device_ops(), mgpu::cuda::reach, kSmallPiece),
        transfer_(mgpu::cuda::device_ops(), mgpu::cpu::device_ops(), mgpu::cuda::reach, kSmallPiece),
        random_(seed) {
    fakeCudaReset(8, seed);
    for (int device : devices) streams_.push_back({mgpu::BackendId::cuda, device, new_stream(device)});
  }
  mgpu::DeviceOps& ops() override { return mgpu::cuda::device_ops(); }
  mgpu::Collectives& collectives() override { return collectives_; }
  mgpu::Transfer& transfer() override { return transfer_; }
  const mgpu::Streams& streams() const override { return streams_; }
  void* allocate(int rank, int64_t nbytes) override {
    const mgpu::cuda::DeviceGuard guard(streams_[rank].device);
    void* memory = nullptr;
    cudaMalloc(&memory, static_cast<size_t>(nbytes));
    ptx::mark_written(memory, static_cast<size_t>(nbytes));  // the suites write it by hand
    return memory;
  }
  void then(mgpu::Stream on, std::function<void()> work) override {
    if (on.on_host()) return work();
    const mgpu::cuda::DeviceGuard guard(on.device);
    fakeLaunch(mgpu::cuda::handle_of(on), [work = std::move(work)](int) {
      work();
      return true;
    });
  }
  void finish() override {
    mgpu::Streams order = streams_;
    std::shuffle(order.begin(), order.end(), random_);
    for (mgpu::Stream stream : order) mgpu::cuda::device_ops().synchronize(stream);
  }

 private:
  mgpu::PeerCollectives collectives_;
  mgpu::Transfer transfer_;
  mgpu::Streams streams_;
  std::mt19937_64 random_;
};
