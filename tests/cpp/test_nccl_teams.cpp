// How teams live beside each other: what is refused before NCCL is asked, launches that take turns, and how teams end,
// with the process too.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>

#include "fakes/nccl/nccl_failures.h"

using namespace mgpu;
using namespace mgpu::fakes;
using std::chrono::milliseconds;

static void mistakes_are_refused() {
  HostDevices devices;
  const auto init = [&](int world, const std::vector<nccl::RankDevice>& ranks) {
    nccl::init(devices, nccl::unique_id(), world, ranks, short_limits());
  };
  CHECK_THROWS(InvalidArgument, "ranks 0 and 2 are both on device 5", (init(3, {{0, 5}, {1, 1}, {2, 5}}), 0));
  CHECK_THROWS(InvalidArgument, "rank 2 is not in a team of 2 ranks", (init(2, {{0, 0}, {2, 1}}), 0));
  CHECK_THROWS(InvalidArgument, "rank 1 is there twice", (init(2, {{1, 0}, {1, 1}}), 0));
  CHECK_THROWS(InvalidArgument, "rank 0 is on device -1, which is no GPU", (init(1, {{0, -1}}), 0));
  CHECK_THROWS(InvalidArgument, "at least one rank", (init(0, {}), 0));
  CHECK_THROWS(InvalidArgument, "at least one rank", (init(1, {}), 0));
  CHECK(fakeNcclCalls("CommInitRankConfig") == 0 && fakeNcclCalls("GroupStart") == 0);
}

static void wrong_calls_are_refused() {
  NcclWorld world({0, 0, 1});
  Memories all = seven(world);
  const Buffers buffers = all.buffers();
  const Stream nowhere = world.devices->new_stream(7);
  const auto reduce_on = [&](const Streams& streams, Algorithm algorithm, bool merge) {
    world.collectives->all_reduce(buffers, buffers, ReduceOp::sum, algorithm, {streams, merge});
    return 0;
  };
  CHECK_THROWS(BackendUnavailable, "no algorithm 'ring'", reduce_on(world.streams, Algorithm::ring, true));
  CHECK_THROWS(BackendUnavailable, "merged there first", reduce_on(world.streams, Algorithm::nccl, false));
  CHECK_THROWS(InvalidArgument, "rank 2 is on device 7",
               reduce_on({world.streams[0], world.streams[1], nowhere}, Algorithm::nccl, true));
  CHECK_THROWS(InvalidArgument, "rank 1 of the team, device 1, has no part",
               reduce_on({world.streams[0], world.streams[1]}, Algorithm::nccl, true));
  CHECK_THROWS(BackendUnavailable, "the root is on device 7",
               (world.collectives->broadcast({{buffers[0], buffers}}, nowhere, world.ranks()), 0));
  CHECK_THROWS(InvalidArgument, "what rank 0 sends to rank 2",
               (world.collectives->exchange({{0, 2, buffers[0]}}, {}, world.streams), 0));
  CHECK_THROWS(InvalidArgument, "peer 3", (world.collectives->exchange({{0, 3, buffers[0]}}, {}, world.streams), 0));
  works(world);
  world.team->close();
  CHECK_THROWS(InvalidArgument, "closed", (works(world), 0));
  world.team->close();
  CHECK(fakeNcclCalls("CommDestroy") == 2 && fakeNcclAborted() == 0);
  fakeNcclReset();
}

static void closing_does_not_wait_for_ever() {
  {
    NcclWorld world({0, 1}, limits(5000, 60'000, 200));
    fakeNcclHold(0, true);
    Memories all = seven(world);
    all_reduce(world, all);
    const auto start = std::chrono::steady_clock::now();
    world.team->close();
    CHECK(std::chrono::steady_clock::now() - start < kEnough);
    CHECK(fakeNcclAlive() == 0 && fakeNcclAborted() == 2);
  }
  fakeNcclReset();
}

// Two teams, four threads, the same devices: the fake refuses two groups that are open over one device, and kernels in
// different orders would wait for each other.
static void launches_take_turns() {
  const auto devices = std::make_shared<HostDevices>();
  const nccl::Limits patient = limits(60'000, 60'000, 1000);  // on a busy machine a thread may miss many turns
  NcclWorld one(devices, {0, 1, 2}, patient), other(devices, {2, 1, 0}, patient);
  fakeNcclSetRounds(3);
  const auto launch_often = [&](NcclWorld& world) {
    Streams streams;
    for (const Stream& stream : world.streams) streams.push_back(devices->new_stream(stream.device));
    for (int turn = 0; turn < 100; ++turn) {
      Memories all = seven(world);
      world.collectives->all_reduce(all.buffers(), all.buffers(), ReduceOp::sum, Algorithm::nccl, {streams, true});
      world.team->wait(streams);
      for (const Numbers& each : all.all) CHECK(each.get(6) == 3 + 18);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&, i] { launch_often(i % 2 ? one : other); });
  for (auto& thread : threads) thread.join();
  fakeNcclReset();
}

// The second team's kernels come behind the first's, though their streams know nothing of each other.
static void teams_on_one_device_are_in_order() {
  const auto devices = std::make_shared<HostDevices>();
  NcclWorld first(devices, {0, 1}, short_limits()), second(devices, {0, 1}, short_limits());
  std::atomic<bool> open{false};
  devices->put(first.streams[0], [&] { return open.load(); });
  Memories all = seven(first), others = seven(second);
  all_reduce(first, all);
  all_reduce(second, others);
  const Event behind = devices->record(second.streams[1]);
  CHECK(!devices->reached(behind) && others.all[1].get(0) == 1);
  open = true;
  second.finish();
  CHECK(all.all[0].get(0) == 1 && others.all[0].get(0) == 1 && others.all[1].get(6) == 13);
}

static void a_busy_device_is_waited_for_with_a_limit() {
  const auto devices = std::make_shared<HostDevices>();
  NcclWorld slow(devices, {0, 1}, limits(1500, 5000, 200)), quick(devices, {1, 2}, limits(100, 5000, 200));
  fakeNcclSetRounds(1'000'000'000);
  std::thread launching([&] {
    Memories all = seven(slow);
    raises(nccl::kTimeout, {"did not end within 1.5 s"}, [&] { all_reduce(slow, all); });
  });
  while (fakeNcclCalls("AllReduce") < 2) std::this_thread::sleep_for(milliseconds(1));
  Memories all = seven(quick);
  CHECK_THROWS(Error, "another thread's launch on the same devices did not end", (all_reduce(quick, all), 0));
  launching.join();
  fakeNcclSetRounds(0);
  works(quick);
  fakeNcclReset();
}

// NCCL 2.30 takes several ranks on one GPU when it is told to; then nothing is merged.
static void several_communicators_on_a_device() {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  HostDevices devices;
  const auto team = nccl::init(devices, nccl::unique_id(), 3, {{0, 0}, {1, 0}, {2, 0}}, short_limits());
  nccl::NcclCollectives collectives(team);
  const Streams streams{devices.new_stream(0), devices.new_stream(0), devices.new_stream(0)};
  Memories all(3, DType::f32, 6, [](size_t rank, int64_t i) { return static_cast<double>(rank) + i; });
  collectives.all_reduce(all.buffers(), all.buffers(), ReduceOp::sum, Algorithm::nccl, {streams, false});
  team->wait(streams);
  for (const Numbers& each : all.all) CHECK(each.get(5) == 18);
  CHECK(fakeNcclAlive() == 3);
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

static void the_current_device_is_left_alone() {
  HostDevices devices;
  const auto current = devices.make_current(3);
  const auto team = nccl::init(devices, nccl::unique_id(), 2, {{0, 6}, {1, 5}}, short_limits());
  CHECK(HostDevices::current() == 3);
}

[[maybe_unused]] static void a_child_is_told(NcclWorld& world) {
  raises(nccl::kInvalidUsage, {"forked from", "make a new team"}, [&] { works(world); });
  world.team->abort("the child gave up");
  CHECK(fakeNcclAborted() == 0);
  world.collectives.reset();
  world.team.reset();  // the communicators are the parent's
  CHECK(fakeNcclCalls("CommFinalize") == 0 && fakeNcclAlive() == 2);
  NcclWorld own({0, 1});
  works(own);
}

// The leak checker cannot suspend the threads of a forked child, so what they alone point to would count as lost.
static bool leaks_are_checked = true;
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off() { return !leaks_are_checked; }

// With a team, something in flight that never ends, and the watchdog awake.
[[maybe_unused]] static void a_process_that_just_ends() {
  leaks_are_checked = false;
  static NcclWorld world({0, 1});
  fakeNcclHold(0, true);
  static Memories all = seven(world);
  all_reduce(world, all);
  std::exit(0);
}

[[maybe_unused]] static void in_child(const std::function<void()>& test) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    test();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void forks() {
#ifndef __SANITIZE_THREAD__  // it refuses threads in a child of a process with threads
  NcclWorld world({0, 1}, limits(5000, 60'000, 1000));
  works(world);
  in_child([&] { a_child_is_told(world); });
  in_child(a_process_that_just_ends);
  works(world);
#endif
}

// What is set before the first communicator counts: NCCL does not read it again.
static void peers_can_be_switched_off_before_the_first_communicator() {
  CHECK(fakeNcclP2pDisabled() == -1);
  setenv("NCCL_P2P_DISABLE", "1", 1);
  NcclWorld world({0, 1});
  unsetenv("NCCL_P2P_DISABLE");
  NcclWorld next({0, 1});
  CHECK(fakeNcclP2pDisabled() == 1);
}

int main() {
  nccl::open({FAKE_NCCL});
  for (const auto& test : {peers_can_be_switched_off_before_the_first_communicator, mistakes_are_refused,
                           wrong_calls_are_refused, closing_does_not_wait_for_ever, launches_take_turns,
                           teams_on_one_device_are_in_order, a_busy_device_is_waited_for_with_a_limit,
                           several_communicators_on_a_device, the_current_device_is_left_alone, forks}) {
    fakeNcclReset();
    test();
    CHECK(fakeNcclAlive() == 0);
  }
  return passed();
}
