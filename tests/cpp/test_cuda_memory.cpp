// Pinned memory of the cuda backend on the fake runtime: how much of it there is, whose it is, and what happens in
// captures and when there is none left.
#include "backends/cuda/memory.h"

#include <thread>

#include "core/buffers.h"
#include "core/error.h"
#include "core/launch_window.h"
#include "cuda_world.h"

using namespace mgpu;

// Large tensors on GPUs that do not reach each other, which go by way of the host; nothing is really moved.
struct Staged {
  explicit Staged(int ranks) : collectives(cuda::device_ops(), cuda::reach) {
    fakeCudaReset(ranks, 0, false);
    fakeCudaCountOnly(true);
    fakeCudaForgetPeak();
    for (int device = 0; device < ranks; ++device) {
      const cuda::DeviceGuard guard(device);
      streams.push_back({BackendId::cuda, device, new_stream(device)});
      void* memory = nullptr;
      cudaMalloc(&memory, kCount * 4);
      all.push_back({memory, kCount, DType::f32});
    }
  }
  void all_reduce(Algorithm algorithm) { collectives.all_reduce(all, all, ReduceOp::sum, algorithm, {streams, true}); }
  void all_of_them(Algorithm algorithm) {
    const Ranks ranks{streams, true};
    const auto count = static_cast<int64_t>(all.size());
    all_reduce(algorithm);
    collectives.reduce({{all, all[0]}}, ReduceOp::sum, ranks, streams[0]);
    collectives.broadcast({{all[0], all}}, streams[0], ranks);
    collectives.all_gather(slices(all, {0, kCount / count}), all, ranks);
    collectives.reduce_scatter(all, slices(all, {0, kCount / count}), ReduceOp::sum, ranks);
    Transfer transfer(cuda::device_ops(), cpu::device_ops(), cuda::reach);
    const Layout whole{all[0].pointer, 1, kCount, 4};
    transfer.scatter(whole, streams[0], {{all[1].pointer, kCount}}, {streams[1]});
    transfer.gather({{all[1].pointer, kCount}}, {streams[1]}, whole, streams[0]);
  }
  void synchronize() {
    for (const Stream& stream : streams) cuda::device_ops().synchronize(stream);
  }

  static constexpr int64_t kCount = 32 * 1024 * 1024;  // 128 MiB
  Streams streams;
  Buffers all;
  PeerCollectives collectives;
};

// A tensor of 128 MiB a rank pins no more than a few pieces, nor do many calls in a row, and what is idle is freed.
static void pinned_memory_is_bounded(int ranks, Algorithm algorithm) {
  Staged team(ranks);
  for (int turn = 0; turn < 2; ++turn) team.all_of_them(algorithm);
  CHECK(fakeCudaPeakPinned() <= cuda::kMostPinnedNbytes);
  CHECK(fakeCudaPeakPinned() <= 3 * (ranks + 1) * int64_t{32 * 1024 * 1024});
  team.synchronize();
  for (int64_t request = 0; request <= cuda::kIdleRequests + 1; ++request) cuda::device_ops().staging(4, team.streams);
  CHECK(fakeCudaPinned() <= 16 * 1024);
}

// While streams are captured the host waits for nothing and frees nothing, whether earlier work is still in flight or
// its memory is idle.  What a graph holds does not count: idle memory stays for others.
static void captures_neither_wait_nor_free() {
  Staged team(2);
  DeviceOps& ops = cuda::device_ops();
  const auto held = ops.staging(kPieceNbytes * 7 / 4, team.streams);  // so that a capture finds no room
  int64_t of_graphs = 0;
  for (bool in_flight : {true, false}) {
    team.all_reduce(Algorithm::direct);
    if (!in_flight) {
      team.synchronize();
      ops.staging(4, team.streams);  // takes back what has been used
      CHECK(fakeCudaPinned() - of_graphs >= 2 * kPieceNbytes);
    }
    const int64_t before = fakeCudaPinned();
    fakeCudaCapture(true);
    team.all_reduce(Algorithm::ring);  // in pieces of another size
    CHECK(fakeCudaWaitsInCaptures() == 0 && fakeCudaPinned() > before);
    fakeCudaCapture(false);
    of_graphs += fakeCudaPinned() - before;
    team.synchronize();
  }
}

// No pinned memory is left in the middle of a staged all-reduce: it says so, and the next one works.
static void no_pinned_memory_is_left() {
  for (int after : {0, 1, 2}) {
    CudaWorld world(3, {0, 1});
    PeerCollectives collectives(cuda::device_ops(), cuda::reach);
    const int64_t count = (1 + after) * 100'000;  // nothing of the size is idle
    conformance::Memories all = conformance::filled(world, count);
    const Buffers buffers = conformance::buffers(all, count);
    const auto sum = [&] { collectives.all_reduce(buffers, buffers, ReduceOp::sum, Algorithm::direct, world.ranks()); };
    fakeCudaFail("cudaHostAlloc", cudaErrorMemoryAllocation, after);
    CHECK_THROWS(CudaError, "cudaHostAlloc: out of memory", (sum(), 0));
    CHECK(cudaGetLastError() == cudaSuccess);
    sum();
    conformance::finish(world, all);
    for (auto& each : all)
      for (int64_t i = 0; i < count; ++i) CHECK(each->seen()[i] == conformance::sum(2, i));
  }
}

// One block cannot be freed: the others are all the same.
static void a_free_that_fails() {
  CudaWorld world(0, {0});
  {
    const auto one = world.ops().staging(kPieceNbytes, world.streams());
    const auto other = world.ops().staging(kPieceNbytes, world.streams());
  }
  const int64_t before = fakeCudaPinned();
  CHECK(before >= 2 * kPieceNbytes);
  fakeCudaFail("cudaFreeHost", cudaErrorIllegalAddress);
  CHECK_THROWS(CudaError, "cudaFreeHost: an illegal", (world.ops().staging(3 * kPieceNbytes, world.streams()), 0));
  CHECK(fakeCudaPinned() <= before - kPieceNbytes);
  world.ops().staging(3 * kPieceNbytes, world.streams());
}

// While another thread captures a graph, ours may ask and wait for its events; memory that a capture uses is never
// handed on.
static void captures_are_left_alone() {
  CudaWorld world(0, {0});
  const Stream stream = world.streams()[0];
  const Event event = world.ops().record(stream);
  CHECK(!world.ops().is_captured(stream));
  fakeCudaCapture(true);
  CHECK(world.ops().is_captured(stream) && !world.ops().is_captured({}));
  CHECK(world.ops().reached(event));
  world.ops().wait({}, event);
  std::weak_ptr<void> kept;
  {
    const auto memory = world.ops().staging(4, world.streams());
    kept = memory;
    world.ops().keep(stream, memory);
  }
  fakeCudaCapture(false);
  world.finish();
  world.ops().staging(4, world.streams());
  CHECK(!kept.expired());
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

// Pinned memory is allocated while nobody launches on several devices.
static void allocations_are_outside_launches() {
  CudaWorld world(0, {0});
  static int allocations = 0;
  fakeCudaOnHostAlloc([] {
    ++allocations;
    std::thread launching([] { CHECK(!launch_window().try_lock_shared()); });
    launching.join();
  });
  world.ops().staging(3 * kPieceNbytes / 2, world.streams());
  fakeCudaOnHostAlloc(nullptr);
  CHECK(allocations == 1);
}

int main() {
  // First, before a graph holds memory for good.
  for (int ranks : {2, 8})
    for (Algorithm algorithm : {Algorithm::direct, Algorithm::ring}) pinned_memory_is_bounded(ranks, algorithm);
  captures_neither_wait_nor_free();
  no_pinned_memory_is_left();
  a_free_that_fails();
  captures_are_left_alone();
  memory_in_use_outlives_a_failure();
  allocations_are_outside_launches();
  return passed();
}
