// The whole cuda room on the fake runtime: every collective and transfer through its own device operations, with 20
// seeds, on devices that reach each other and on some that do not; and what happens when CUDA fails.
#include "backends/cuda/cuda.h"
#include "backends/cuda/guard.h"
#include "conformance.h"
#include "core/error.h"
#include "cuda_runtime.h"
#include "fakes/cuda/fake_cuda.h"

using namespace mgpu;

static cudaStream_t new_stream(int device) {
  const cuda::DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

class CudaWorld final : public World {
 public:
  CudaWorld(uint64_t seed, const std::vector<int>& devices)
      : collectives_(cuda::device_ops(), cuda::reach),
        transfer_(cuda::device_ops(), cpu::device_ops(), cuda::reach),
        random_(seed) {
    fakeCudaReset(8, seed);
    for (int device : devices) streams_.push_back({device, new_stream(device)});
  }
  DeviceOps& ops() override { return cuda::device_ops(); }
  Collectives& collectives() override { return collectives_; }
  Transfer& transfer() override { return transfer_; }
  const Streams& streams() const override { return streams_; }
  void* allocate(int rank, int64_t nbytes) override {
    const cuda::DeviceGuard guard(streams_[rank].device);
    void* memory = nullptr;
    cudaMalloc(&memory, static_cast<size_t>(nbytes));
    return memory;
  }
  void then(Stream on, std::function<void()> work) override {
    if (on.device == kHost) return work();
    const cuda::DeviceGuard guard(on.device);
    fakeLaunch(cuda::handle_of(on), std::move(work));
  }
  void finish() override {
    Streams order = streams_;
    std::shuffle(order.begin(), order.end(), random_);
    for (Stream stream : order) cuda::device_ops().synchronize(stream);
  }

 private:
  PeerCollectives collectives_;
  Transfer transfer_;
  Streams streams_;
  std::mt19937_64 random_;
};

static void everything(const std::vector<int>& devices) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto make = [&] { return std::make_unique<CudaWorld>(seed, devices); };
    conformance::collectives(make, {0, 1, 7});
    conformance::transfers(make);
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
  CHECK_THROWS(CudaError, "cudaHostAlloc: out of memory", (world.ops().staging(int64_t{1} << 40), 0));
  const Stream elsewhere{0, new_stream(1)};
  CHECK_THROWS(CudaError, "invalid resource handle",
               (world.ops().sum_ranks({{{one.data()}, {one.data()}, 4, DType::i32, ReduceOp::sum, 1}}, elsewhere), 0));
  CHECK_THROWS(CudaError, "cuDevicePrimaryCtxRetain: invalid device ordinal", (world.ops().record({9, nullptr}), 0));
  int current = -1;
  cudaGetDevice(&current);
  CHECK(current == 1 && cudaGetLastError() == cudaSuccess);
  sum();  // and all is well again
  world.finish();
}

// A team of GPUs 1 and 2 makes no context on GPU 0, and leaves a thread that had none without one.
static void nobody_elses_gpu_is_touched() {
  CudaWorld world(0, {1, 2});
  Memory<int32_t> one(world, 0, 4), two(world, 1, 4);
  const Buffers both{{one.data(), 4, DType::i32}, {two.data(), 4, DType::i32}};
  world.collectives().all_reduce(both, both, ReduceOp::sum, Algorithm::direct, world.ranks());
  world.finish();
  CHECK(fakeCudaContexts() == 2);
}

// While another thread captures a graph, ours may ask for its events; memory that a capture uses is never handed on.
static void captures_are_left_alone() {
  CudaWorld world(0, {0});
  const Stream stream = world.streams()[0];
  const Event event = world.ops().record(stream);
  fakeCudaCapture(true);
  CHECK(world.ops().reached(event));
  std::weak_ptr<void> kept;
  {
    const auto memory = world.ops().staging(4);
    kept = memory;
    world.ops().keep(stream, memory);
  }
  world.finish();
  world.ops().staging(4);
  CHECK(!kept.expired());
  fakeCudaCapture(false);
  CHECK(cudaGetLastError() == cudaSuccess);
}

// A call that fails half way gives no memory back that is still written.
static void memory_in_use_outlives_a_failure() {
  CudaWorld world(0, {0, 1});
  Memory<int32_t> part(world, 0, 4), other(world, 1, 4);
  std::vector<int32_t> whole(8, 7);
  fakeCudaFail("cudaMemcpyAsync", cudaErrorIllegalAddress, 1);
  CHECK_THROWS(
      CudaError, "illegal memory access",
      (world.transfer().scatter({whole.data(), 1, 8, 4}, {}, {{part.data(), 4}, {other.data(), 4}}, world.streams()),
       0));
  world.finish();
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
               (world.ops().sum_ranks({{{there}, {here}, 4, DType::i32, ReduceOp::sum, 1}}, world.streams()[0]), 0));
  CHECK(fakeCudaLaunches() == 0);
}

static void peers() {
  fakeCudaReset(8, 0, false);
  CHECK_THROWS(InvalidArgument, "device 0 cannot access device 1", (cuda::allow_peers({{0, 1}}), 0));
  CHECK(!cuda::reach(0, 1) && cuda::reach(1, 1));
  fakeCudaReset(8, 0);
  CHECK_THROWS(InvalidArgument, "two devices", (cuda::allow_peers({{1, 1}}), 0));
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
  captures_are_left_alone();
  memory_in_use_outlives_a_failure();
  code();
  everything({0, 1, 2});  // nobody has been allowed to reach another: by way of the host
  everything({0, 0, 0});
  peers();
  for (const auto& devices :
       std::vector<std::vector<int>>{{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 1, 0}})
    everything(devices);
  failures();
  nobody_elses_gpu_is_touched();
  CHECK(cuda::device_count() == 8 && cuda::driver_version() == cuda::runtime_version());
  return passed();
}
