// All-reduces by push on the fake runtime, whose streams are late and whose launches wait for each other: the bits of
// `direct`, thousands of calls on whatever streams, ranks that come late or never, and launches that fail.
#include "core/push_team.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "cuda_world.h"
#include "ptx_faults.h"

using namespace mgpu;

using Bytes = std::vector<unsigned char>;

constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64, DType::u8};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max};
// By the fake's clock, which moves by 1 ms each time a kernel finds a flag not set yet.
constexpr std::chrono::seconds kLimit{500};
constexpr std::chrono::milliseconds kShortLimit{100};
const Reach kReach = [](int, int) { return true; };

// Any integers; of floating dtypes numbers whose sums are rounded, and no NaN, whose bits nobody promises.
static Bytes random_bytes(std::mt19937_64& random, int64_t count, DType dtype) {
  Bytes bytes(static_cast<size_t>(count) * itemsize(dtype));
  if (!is_floating(dtype)) {
    for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
    return bytes;
  }
  std::normal_distribution<> normal;
  std::vector<double> numbers(static_cast<size_t>(count));
  for (double& number : numbers) number = normal(random);
  cpu::device_ops().scale_cast({numbers.data(), DType::f64, bytes.data(), dtype, count, 1.0}, {});
  return bytes;
}

// Ranks with the memory in which they meet: of it flags and words are 0, and slots were never written.
struct Team {
  Team(uint64_t seed, const std::vector<int>& devices) : world(seed, devices) {
    std::vector<void*> memory;
    const auto nbytes = static_cast<size_t>(push_memory_nbytes(world.size()));
    const size_t slots = 2 * devices.size() * kPushSlotNbytes;
    for (int device : devices) {
      const cuda::DeviceGuard guard(device);
      void* made = nullptr;
      cudaMalloc(&made, nbytes);
      const Bytes zeros(nbytes - slots);
      cudaMemcpy(static_cast<char*>(made) + slots, zeros.data(), zeros.size(), cudaMemcpyHostToDevice);
      memory.push_back(made);
    }
    team = std::make_unique<PushTeam>(world.ops(), kReach, world.streams(), memory);
  }

  Buffers allocate(int64_t count, DType dtype, int64_t offset = 0) {
    Buffers buffers;
    for (int rank = 0; rank < world.size(); ++rank) {
      auto* memory = static_cast<char*>(world.allocate(rank, (count + offset) * static_cast<int64_t>(itemsize(dtype))));
      buffers.push_back({memory + offset * static_cast<int64_t>(itemsize(dtype)), count, dtype});
    }
    return buffers;
  }
  void fill(const Buffers& buffers, const std::vector<Bytes>& values, const Streams& streams) {
    for (size_t rank = 0; rank < buffers.size(); ++rank)
      world.then(streams[rank], [to = static_cast<unsigned char*>(buffers[rank].pointer), from = values[rank]] {
        std::copy(from.begin(), from.end(), to);
      });
  }
  // What the buffers hold when their streams come to it, after finish().
  std::shared_ptr<std::vector<Bytes>> read(const Buffers& buffers, const Streams& streams) {
    auto seen = std::make_shared<std::vector<Bytes>>(buffers.size());
    for (size_t rank = 0; rank < buffers.size(); ++rank)
      world.then(streams[rank], [seen, rank, from = buffers[rank]] {
        const auto* bytes = static_cast<const unsigned char*>(from.pointer);
        (*seen)[rank].assign(bytes, bytes + nbytes_of(from));
        std::memset(from.pointer, 0xDD, static_cast<size_t>(nbytes_of(from)));
      });
    return seen;
  }

  CudaWorld world;
  std::unique_ptr<PushTeam> team;
};

// Arrays that begin at unequal addresses modulo 16 bytes are added up one by one.
static void has_the_bits_of_direct(Team& of, DType dtype, ReduceOp op, int64_t count, int64_t offset, bool in_place,
                                   std::mt19937_64& random) {
  const Streams& streams = of.world.streams();
  std::vector<Bytes> values;
  for (size_t rank = 0; rank < streams.size(); ++rank) values.push_back(random_bytes(random, count, dtype));
  const Buffers in = of.allocate(count, dtype, offset), out = in_place ? in : of.allocate(count, dtype, 2 * offset);
  of.fill(in, values, streams);
  of.team->all_reduce(in, out, op, streams, kLimit);
  const auto pushed = of.read(out, streams);
  of.fill(in, values, streams);
  of.world.collectives().all_reduce(in, out, op, Algorithm::direct, {streams, true});
  const auto expected = of.read(out, streams);
  of.world.finish();
  CHECK(*pushed == *expected);
}

static void bits(const std::vector<int>& devices) {
  std::mt19937_64 random(devices.size());
  Team of(devices.size(), devices);
  for (DType dtype : kDTypes)
    for (ReduceOp op : kOps) {
      const auto most = kPushNbytes / static_cast<int64_t>(itemsize(dtype));
      const int64_t more_than_a_tile = 16 * 1024 / static_cast<int64_t>(itemsize(dtype)) + 17;
      for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, more_than_a_tile})
        for (int64_t offset : {0, 1})  // with one that is not in place, addresses differ modulo 16 bytes
          for (bool in_place : {false, true}) has_the_bits_of_direct(of, dtype, op, count, offset, in_place, random);
      if (op == ReduceOp::sum) has_the_bits_of_direct(of, dtype, op, random() % 2 ? most : most - 3, 0, true, random);
    }
  has_the_bits_of_direct(of, DType::u8, ReduceOp::sum, kPushNbytes, 1, false, random);          // many tiles of a block
  has_the_bits_of_direct(of, DType::f32, ReduceOp::sum, kPushNbytes / 2 + 5, 0, true, random);  // several launches
  no_faults();
}

// Each call on some stream of each device, which has memory of its own: nothing but the team orders them.
static void on_whatever_streams(const std::vector<int>& devices, int calls) {
  std::mt19937_64 random(calls);
  Team of(devices.size(), devices);
  std::vector<Streams> all{of.world.streams()};
  for (int more = 0; more < 2; ++more) {
    all.emplace_back();
    for (int device : devices) all.back().push_back({BackendId::cuda, device, new_stream(device)});
  }
  const auto finish = [&] {
    for (const Streams& each : all)
      for (Stream stream : each) of.world.ops().synchronize(stream);
  };
  const int ranks = static_cast<int>(devices.size());
  std::vector<std::shared_ptr<std::vector<Bytes>>> seen;
  std::vector<int32_t> sums;
  const auto check = [&] {
    finish();
    for (size_t i = 0; i < seen.size(); ++i)
      for (const Bytes& bytes : *seen[i]) {
        std::vector<int32_t> numbers(bytes.size() / sizeof(int32_t));
        std::memcpy(numbers.data(), bytes.data(), bytes.size());
        for (int32_t number : numbers) CHECK(number == sums[i]);
      }
    seen.clear();
    sums.clear();
  };
  std::vector<Buffers> memory;
  for (size_t i = 0; i < all.size(); ++i) memory.push_back(of.allocate(5000, DType::i32));
  for (int call = 0; call < calls; ++call) {
    Streams streams;
    Buffers buffers;
    const int64_t count = random() % 50 ? 1 + static_cast<int64_t>(random() % 9) : 5000;
    std::vector<Bytes> values;
    for (int rank = 0; rank < ranks; ++rank) {
      const size_t chosen = random() % all.size();
      streams.push_back(all[chosen][rank]);
      buffers.push_back({memory[chosen][rank].pointer, count, DType::i32});
      const std::vector<int32_t> numbers(count, call * (rank + 1));
      values.emplace_back(count * sizeof(int32_t));
      std::memcpy(values.back().data(), numbers.data(), values.back().size());
    }
    of.fill(buffers, values, streams);
    of.team->all_reduce(buffers, buffers, ReduceOp::sum, streams, kLimit);
    seen.push_back(of.read(buffers, streams));
    sums.push_back(call * ranks * (ranks + 1) / 2);
    if (random() % 20 == 0) check();
    if (random() % 10 == 0) of.world.ops().synchronize(streams[random() % streams.size()]);
  }
  check();
  no_faults();
}

// The stream of rank 1 does not move, and three more calls are queued behind the first.
static void one_that_never_comes(DType dtype, ReduceOp op) {
  Team of(3, {0, 1, 2});
  const Streams& streams = of.world.streams();
  const auto is_free = std::make_shared<bool>(false);
  {
    const cuda::DeviceGuard guard(1);
    fakeLaunch(cuda::handle_of(streams[1]), [is_free](int) { return *is_free; });
  }
  const Buffers memory = of.allocate(100, dtype, 1);
  std::mt19937_64 random(1);
  std::vector<Bytes> values;
  for (int rank = 0; rank < 3; ++rank) values.push_back(random_bytes(random, 100, dtype));
  of.fill(memory, values, streams);
  of.team->all_reduce(memory, memory, op, streams, kShortLimit);
  const Buffers more = of.allocate(100, dtype);
  for (int call = 0; call < 3; ++call) of.team->all_reduce(more, more, op, streams, kShortLimit);
  of.team->check();  // nobody knows yet
  for (int rank : {0, 2}) of.world.ops().synchronize(streams[static_cast<size_t>(rank)]);
  CHECK_THROWS(Error, "gave up an all-reduce by push: rank 1 did not come to it", (of.team->check(), 0));
  for (size_t rank : {size_t{0}, size_t{2}}) {
    Bytes now(100 * itemsize(dtype));
    std::memcpy(now.data(), memory[rank].pointer, now.size());
    if (is_floating(dtype)) {
      std::vector<double> numbers(100);
      cpu::device_ops().scale_cast({now.data(), dtype, numbers.data(), DType::f64, 100, 1.0}, {});
      for (double number : numbers) CHECK(std::isnan(number));
    } else {
      CHECK(now == values[rank]);
    }
  }
  CHECK_THROWS(Error, "gave up", (of.team->all_reduce(memory, memory, op, streams, kShortLimit), 0));
  *is_free = true;
  of.world.finish();
  Bytes expected(100 * itemsize(dtype)), of_the_late_one = expected;
  const int divisor = op == ReduceOp::avg ? 3 : 1;
  cpu::device_ops().sum_ranks(
      {{{values[0].data(), values[1].data(), values[2].data()}, {expected.data()}, 100, dtype, op, divisor}}, {});
  std::memcpy(of_the_late_one.data(), memory[1].pointer, expected.size());
  CHECK(of_the_late_one == expected);  // the others' later values did not take the place of these
  no_faults();
}

static void a_launch_that_fails() {
  Team of(0, {0, 1});
  const Streams& streams = of.world.streams();
  const Buffers memory = of.allocate(4, DType::f32);
  const uint64_t begin = fakeGlobalTimer();
  fakeCudaFail("cudaLaunchKernel", cudaErrorInvalidValue, 1);
  CHECK_THROWS(CudaError, "push_sum_kernel: invalid argument",
               (of.team->all_reduce(memory, memory, ReduceOp::sum, streams, kLimit), 0));
  CHECK_THROWS(Error, "could not be started on all",
               (of.team->all_reduce(memory, memory, ReduceOp::sum, streams, kLimit), 0));
  of.world.finish();
  CHECK(fakeGlobalTimer() - begin < 1'000'000'000);  // the one that was started does not wait up to its limit
  CHECK_THROWS(Error, "could not be started on all", (of.team->check(), 0));
  Team next(0, {0, 1});
  std::mt19937_64 random(2);
  has_the_bits_of_direct(next, DType::f32, ReduceOp::sum, 100, 0, true, random);
}

static void refusals() {
  Team of(0, {0, 1});
  const Streams& streams = of.world.streams();
  const Buffers memory = of.allocate(4, DType::f32);
  const Reach nobody = [](int, int) { return false; };
  CHECK_THROWS(BackendUnavailable, "that reach each other",
               (PushTeam(of.world.ops(), nobody, streams, {nullptr, nullptr})));
  CHECK_THROWS(BackendUnavailable, "that reach each other",
               (PushTeam(cpu::device_ops(), kReach, {Stream{}, Stream{}}, {nullptr, nullptr})));
  CHECK_THROWS(InvalidArgument, "one entry per rank", (PushTeam(of.world.ops(), kReach, streams, {nullptr})));
  CHECK_THROWS(InvalidArgument, "of the team",
               (of.team->all_reduce({memory[0]}, {memory[0]}, ReduceOp::sum, {streams[0]}, kLimit), 0));
  CHECK_THROWS(BackendUnavailable, "a stream for each rank",
               (of.team->all_reduce(memory, memory, ReduceOp::sum, {streams[0], streams[0]}, kLimit), 0));
  fakeCudaCapture(true);
  CHECK_THROWS(BackendUnavailable, "captured",
               (of.team->all_reduce(memory, memory, ReduceOp::sum, streams, kLimit), 0));
  fakeCudaCapture(false);
  CHECK_THROWS(BackendUnavailable, "by a team of its own",
               (of.world.collectives().all_reduce(memory, memory, ReduceOp::sum, Algorithm::push, {streams, true}), 0));
  CHECK_THROWS(BackendUnavailable, "that reach each other", (cpu::device_ops().push_sum({}, {}), 0));
  CHECK(fakeCudaLaunches() == 0);
}

static void one_launch_a_rank() {
  Team of(0, {0, 1, 2, 3});
  const Buffers memory = of.allocate(1000, DType::f32);
  for (int call = 0; call < 3; ++call) {
    const int before = fakeCudaLaunches();
    of.team->all_reduce(memory, memory, ReduceOp::sum, of.world.streams(), kLimit);
    CHECK(fakeCudaLaunches() == before + 4);
  }
  of.world.finish();
}

int main() {
  std::vector<std::pair<int, int>> all;
  fakeCudaReset(8, 0);
  for (int device = 0; device < 8; ++device)
    for (int peer = 0; peer < 8; ++peer)
      if (device != peer) all.emplace_back(device, peer);
  cuda::allow_peers(all);
  refusals();
  one_launch_a_rank();
  a_launch_that_fails();
  for (DType dtype : kDTypes)
    for (ReduceOp op : kOps) one_that_never_comes(dtype, op);
  const std::vector<std::vector<int>> teams{{0, 1}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 0}, {2, 0, 2}};
  for (const auto& devices : teams) bits(devices);
  for (const auto& devices : teams) on_whatever_streams(devices, ptx::is_wanted() ? 50 : 2000);
  return passed();
}
