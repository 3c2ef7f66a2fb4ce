// The whole cuda backend on the fake runtime: every collective and transfer through its own device operations, with 20
// seeds, on devices that reach each other and on some that do not; and what happens when CUDA fails.
#include "core/error.h"
#include "cuda_world.h"
#include "ptx_faults.h"

using namespace mgpu;

static void everything(const std::vector<int>& devices) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto make = [&] { return std::make_unique<CudaWorld>(seed, devices); };
    conformance::collectives(make, {0, 1, 7});
    conformance::transfers(make);
  }
}

static void transfers_from_both_ends() {
  for (uint64_t seed = 0; seed < 40; ++seed)
    for (int at : {0, 1}) {
      CudaWorld world(seed, {0, 1});
      conformance::transfers_from_both_ends(world, at);
    }
}

// The one that is current before is current afterwards, whatever happened.
static void failures() {
  CudaWorld world(0, {0, 1});
  Memory<int32_t> one(world, 0, 4), two(world, 1, 4);
  const auto sum = [&] {
    world.collectives().all_reduce({{one.data(), 4, DType::i32}, {two.data(), 4, DType::i32}},
                                   {{one.data(), 4, DType::i32}, {two.data(), 4, DType::i32}}, ReduceOp::sum,
                                   Algorithm::direct, world.ranks());
  };
  cudaSetDevice(1);
  fakeCudaFail("cudaLaunchKernel", cudaErrorInvalidValue);
  CHECK_THROWS(CudaError, "sum_ranks_kernel: invalid argument (cudaErrorInvalidValue)", (sum(), 0));
  fakeCudaFail("cudaEventRecord", cudaErrorIllegalAddress);
  CHECK_THROWS(CudaError, "cudaEventRecord: an illegal memory access", (sum(), 0));
  fakeCudaFail("cudaHostAlloc", cudaErrorMemoryAllocation);
  CHECK_THROWS(CudaError, "cudaHostAlloc: out of memory", (world.ops().staging(int64_t{1} << 40, world.streams()), 0));
  const Stream elsewhere{BackendId::cuda, 0, new_stream(1)};
  CHECK_THROWS(CudaError, "invalid resource handle",
               (world.ops().sum_ranks({{{one.data()}, {one.data()}, 4, DType::i32, ReduceOp::sum, 1}}, elsewhere), 0));
  CHECK_THROWS(CudaError, "cuDevicePrimaryCtxRetain: invalid device ordinal",
               (world.ops().record({BackendId::cuda, 9, nullptr}), 0));
  int current = -1;
  cudaGetDevice(&current);
  CHECK(current == 1 && cudaGetLastError() == cudaSuccess);
  sum();  // and all is well again
  world.finish();
}

// A team of GPUs 1 and 2 makes no context on GPU 0, and leaves a thread that had none without one.
// Enabled peers do not help where the memory itself is not mapped for them.
static void memory_that_is_not_mapped_for_peers() {
  if (!ptx::is_wanted()) return;  // the host compiler's kernels do not know whose memory they touch
  for (bool mapped : {true, false}) {
    CudaWorld world(0, {0, 1});
    fakeCudaMapForPeers(mapped);
    Memory<int32_t> one(world, 0, 64), two(world, 1, 64);
    const Buffers both{{one.data(), 64, DType::i32}, {two.data(), 64, DType::i32}};
    world.collectives().all_reduce(both, both, ReduceOp::sum, Algorithm::direct, world.ranks());
    world.finish();
    char text[4096];
    CHECK((mgpu_ptx_take_faults(text, sizeof text) == 0) == mapped);
    CHECK(mapped || std::string(text).find("access of device 0 to memory of device 1") != std::string::npos);
  }
}

static void nobody_elses_gpu_is_touched() {
  CudaWorld world(0, {1, 2});
  Memory<int32_t> one(world, 0, 4), two(world, 1, 4);
  const Buffers both{{one.data(), 4, DType::i32}, {two.data(), 4, DType::i32}};
  world.collectives().all_reduce(both, both, ReduceOp::sum, Algorithm::direct, world.ranks());
  world.finish();
  world.ops().staging(kPieceNbytes, world.streams());  // memory that is not idle yet
  CHECK(fakeCudaContexts() == 2);
}

static void code() {
  fakeCudaReset(2, 0);
  CHECK(cuda::has_code_for(1));
  fakeCudaFail("cudaFuncGetAttributes", cudaErrorInvalidValue);
  CHECK(!cuda::has_code_for(1) && cudaGetLastError() == cudaSuccess);
}

static void memory_of_another_device_is_refused() {
  CudaWorld world(0, {0, 1});
  void *here = world.allocate(0, 16), *there = world.allocate(1, 16);
  CHECK_THROWS(InvalidArgument, "must be of device 0, and is of device 1, which it does not reach",
               (cuda::check_memory(there, 0, "a tensor"), 0));
  cuda::check_memory(here, 0, "a tensor");
}

static void peers() {
  fakeCudaReset(8, 0, false);
  CHECK_THROWS(InvalidArgument, "device 0 cannot access device 1", (cuda::allow_peers({{0, 1}}), 0));
  CHECK(!cuda::reach(0, 1) && cuda::reach(1, 1));
  fakeCudaReset(8, 0);
  CHECK_THROWS(InvalidArgument, "two devices", (cuda::allow_peers({{1, 1}}), 0));
  fakeCudaFail("cudaDeviceEnablePeerAccess", cudaErrorTooManyPeers, 1);
  CHECK_THROWS(CudaError, "cudaDeviceEnablePeerAccess", (cuda::allow_peers({{0, 1}, {1, 0}}), 0));
  CHECK(!cuda::reach(0, 1) && !cuda::reach(1, 0) && cudaGetLastError() == cudaSuccess);
  std::vector<std::pair<int, int>> all;
  for (int device = 0; device < 8; ++device)
    for (int peer = 0; peer < 8; ++peer)
      if (device != peer) all.emplace_back(device, peer);
  cuda::allow_peers(all);
  cuda::allow_peers(all);  // torch may have done it before
  CHECK(cuda::reach(0, 7) && cuda::reach(7, 0));
}

int main() {
  memory_of_another_device_is_refused();
  code();
  everything({0, 1, 2});  // nobody has been allowed to reach another: by way of the host
  everything({0, 0, 0});
  transfers_from_both_ends();
  peers();
  transfers_from_both_ends();
  for (const auto& devices :
       std::vector<std::vector<int>>{{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 1, 0}})
    everything(devices);
  failures();
  no_faults();
  memory_that_is_not_mapped_for_peers();
  nobody_elses_gpu_is_touched();
  CHECK(cuda::device_count() == 8 && cuda::driver_version() == cuda::runtime_version());
  no_faults();
  return passed();
}
