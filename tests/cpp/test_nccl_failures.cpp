// What goes wrong with NCCL, and what is promised then: the right error with its code and words, a team that is usable
// or says that it is not, and no hang.  Every failure is injected into the fake libnccl.
#include <atomic>
#include <thread>

#include "core/launch_window.h"
#include "fakes/nccl/nccl_failures.h"

using namespace mgpu;
using namespace mgpu::fakes;
using std::chrono::milliseconds;
using std::chrono::seconds;

// It says so at once, whatever is asked of it, and nothing of it is left.
static void is_aborted(NcclWorld& world, int code, const std::string& why) {
  CHECK(fakeNcclAlive() == 0);
  Memories all = seven(world);
  const std::vector<std::string> words{why, "All communicators of the team were aborted", "make a new team"};
  raises(code, words, [&] { all_reduce(world, all); });
  raises(code, words, [&] { world.team->check(); });
  raises(code, words, [&] { world.team->wait(world.streams); });
  world.team->abort("again");
  world.team->close();
  CHECK(fakeNcclAborted() == static_cast<int>(world.team->ranks().size()));
}

static void inits_that_fail() {
  const auto make = [] { NcclWorld world({0, 1, 2}); };
  fakeNcclFail("CommInitRankConfig", 2, nccl::kSystemError);
  raises(nccl::kSystemError,
         {"ncclCommInitRankConfig of 3 ranks failed on rank 1, device 1", "unhandled system error", "NCCL error 2",
          "injected failure", "make a new team"},
         make);
  CHECK(fakeNcclAlive() == 0);
  fakeNcclReset();
  fakeNcclFailInit(2, nccl::kRemoteError);
  raises(nccl::kRemoteError, {"of 3 ranks failed: remote process exited or there was a network error"}, make);
  CHECK(fakeNcclAlive() == 0 && fakeNcclAborted() == 3);
  fakeNcclReset();
  HostDevices devices;
  std::thread allocating([] {
    while (fakeNcclCalls("GroupEnd") < 1) std::this_thread::yield();
    const OutsideLaunchWindow window(launch_window(), std::try_to_lock);
    CHECK(window.owns_lock());  // an init launches nothing that an allocation could wait for
  });
  raises(nccl::kTimeout, {"ncclCommInitRankConfig of 2 ranks (ranks 1 of 2) did not end within 0.2 s", "its peers"},
         [&] { nccl::init(devices, nccl::unique_id(), 2, {{1, 0}}, limits(200, 200, 200)); });
  allocating.join();
  CHECK(fakeNcclAlive() == 0);
  fakeNcclFail("GetUniqueId", 1, nccl::kSystemError);
  raises(nccl::kSystemError, {"ncclGetUniqueId failed", "unhandled system error"}, [] { nccl::unique_id(); });
}

static void calls_that_fail() {
  for (const char* operation : {"AllReduce", "GroupEnd"}) {
    NcclWorld world({0, 1, 2});
    works(world);
    fakeNcclFail(operation, operation == std::string("AllReduce") ? 2 : 1, nccl::kUnhandledCudaError);
    Memories all = seven(world);
    raises(nccl::kUnhandledCudaError, {"ncclAllReduce(count 7, int32, sum) failed", "unhandled cuda error"},
           [&] { all_reduce(world, all); });
    is_aborted(world, nccl::kUnhandledCudaError, "ncclAllReduce(count 7, int32, sum) failed");
    fakeNcclReset();
  }
  NcclWorld world({0, 1});
  fakeNcclFail("GroupStart", 1, nccl::kInternalError);
  Memories all = seven(world);
  raises(nccl::kInternalError, {"internal error"}, [&] { all_reduce(world, all); });
  is_aborted(world, nccl::kInternalError, "internal error");
  fakeNcclReset();
}

static void an_invalid_argument_leaves_the_team_usable() {
  NcclWorld world({0, 1});
  fakeNcclFail("AllReduce", 2, nccl::kInvalidArgument);
  Memories all = seven(world);
  raises(nccl::kInvalidArgument, {"failed on rank 1, device 1: invalid argument", "the team is still usable"},
         [&] { all_reduce(world, all); });
  works(world);
}

// Unless another thread aborts it meanwhile.
static void an_invalid_argument_in_an_aborted_team() {
  NcclWorld world({0, 1});
  std::thread owner;
  const auto part = [&](size_t, nccl::Handle communicator, void* stream) {
    if (!owner.joinable()) owner = std::thread([&] { world.team->abort("the owner gave up"); });
    while (fakeNcclCalls("CommAbort") < 2) std::this_thread::yield();
    return world.team->api().AllReduce(nullptr, nullptr, 7, nccl::kInt32, nccl::kSum, communicator, stream);
  };
  raises(nccl::kSuccess, {"the owner gave up"}, [&] { world.team->launch("a sum", world.streams, part); });
  owner.join();
  is_aborted(world, nccl::kSuccess, "the owner gave up");
}

// Unless NCCL itself says that a communicator is not.
static void an_invalid_argument_that_sticks_does_not() {
  NcclWorld world({0, 1});
  fakeNcclFail("AllReduce", 2, nccl::kInvalidArgument);
  fakeNcclAsync(1, nccl::kInvalidArgument);
  Memories all = seven(world);
  raises(nccl::kInvalidArgument, {"failed on rank 1"}, [&] { all_reduce(world, all); });
  is_aborted(world, nccl::kInvalidArgument, "invalid argument");
  fakeNcclReset();
}

// Waits, with a limit, until the watchdog has aborted all communicators; returns how long that took.
static std::chrono::steady_clock::duration time_until_aborted() {
  const auto start = std::chrono::steady_clock::now();
  while (fakeNcclAlive() > 0 && std::chrono::steady_clock::now() - start < kEnough)
    std::this_thread::sleep_for(milliseconds(5));
  return std::chrono::steady_clock::now() - start;
}

static void an_asynchronous_error_ends_what_waits() {
  NcclWorld world({0, 1});
  fakeNcclHold(1, true);
  Memories all = seven(world);
  all_reduce(world, all);
  std::thread network([] {
    std::this_thread::sleep_for(milliseconds(100));
    fakeNcclAsync(0, nccl::kRemoteError);
  });
  raises(nccl::kRemoteError, {"ncclAllReduce(count 7, int32, sum), while it ran, failed on rank 0, device 0"},
         [&] { world.finish(); });
  network.join();
  time_until_aborted();  // it may be the watchdog that aborts: the wait ends as soon as the team has failed
  is_aborted(world, nccl::kRemoteError, "while it ran");
  for (const Stream& stream : world.streams) world.devices->synchronize(stream);  // the streams were let go
  fakeNcclReset();
}

// Nobody waits for the streams; the watchdog finds out alone.
static void a_peer_that_never_comes_meets_the_limit() {
  NcclWorld world({0, 1, 2}, limits(5000, 300, 300));
  works(world);
  fakeNcclHold(1, true);
  Memories all = seven(world);
  all_reduce(world, all);
  const auto took = time_until_aborted();
  CHECK(took > milliseconds(250) && took < seconds(5));
  is_aborted(world, nccl::kTimeout, "ncclAllReduce(count 7, int32, sum) (ranks 0, 1, 2 of 3) did not end within 0.3 s");
  fakeNcclReset();
}

// The limit is for a time without progress, not for all that is in flight.
static void many_short_ones_are_not_late() {
  NcclWorld world({0, 1}, limits(5000, 500, 300));
  Memories all = seven(world);
  std::atomic<int> opened{0};
  for (int turn = 1; turn <= 8; ++turn) {
    world.devices->put(world.streams[0], [&opened, turn] { return opened >= turn; });
    all_reduce(world, all);
  }
  while (opened < 8) {
    std::this_thread::sleep_for(milliseconds(125));
    ++opened;
  }
  world.finish();
  CHECK(fakeNcclAborted() == 0);
}

static void a_launch_that_never_gets_ready() {
  NcclWorld world({0, 1}, limits(300, 5000, 300));
  fakeNcclSetRounds(1'000'000'000);
  Memories all = seven(world);
  raises(nccl::kTimeout, {"ncclAllReduce(count 7, int32, sum) (ranks 0, 1 of 2) did not end within 0.3 s"},
         [&] { all_reduce(world, all); });
  is_aborted(world, nccl::kTimeout, "did not end within");
  fakeNcclReset();
}

// NCCL blocks in a call of the group until after the launch was given up: the calls that follow find all they need.
static void a_launch_that_goes_on_when_given_up() {
  NcclWorld world({0, 1}, limits(50, 5000, 50));
  Memories one = seven(world), other = seven(world);
  fakeNcclBlock("Reduce", true);
  raises(nccl::kTimeout, {"ncclReduce(count 14, int32, 2 tensors, sum) (ranks 0, 1 of 2) did not end within 0.05 s"},
         [&] {
           world.collectives->reduce({{one.buffers(), one.all[0].buffer()}, {other.buffers(), other.all[0].buffer()}},
                                     ReduceOp::sum, world.ranks(), world.streams[0]);
         });
  CHECK(fakeNcclAlive() == 2);  // nothing is freed while the launch uses it
  fakeNcclBlock("Reduce", false);
  time_until_aborted();
  CHECK(fakeNcclCalls("Reduce") == 4 && fakeNcclCalls("GroupEnd") == 3);
  is_aborted(world, nccl::kTimeout, "did not end within");
}

static void an_owner_may_abort() {
  NcclWorld world({0, 1});
  fakeNcclHold(0, true);
  Memories all = seven(world);
  all_reduce(world, all);
  world.team->abort("the owner gave up");
  is_aborted(world, nccl::kSuccess, "the owner gave up");
  fakeNcclReset();
}

// A launch costs no questions about its progress, and no thread: only that of the launcher, which its team has.
static void a_launch_is_one_group() {
  NcclWorld world({0, 1});
  works(world);
  world.devices->synchronize(world.streams[0]);
  const long asked = fakeNcclCalls("CommGetAsyncError"), groups = fakeNcclCalls("GroupEnd");
  Memories all = seven(world);
  for (int turn = 0; turn < 10; ++turn) all_reduce(world, all);
  CHECK(fakeNcclCalls("GroupEnd") == groups + 10);
  CHECK(fakeNcclCalls("CommGetAsyncError") - asked < 10);  // the watchdog's
  world.finish();
}

// The launcher is inside NCCL when the team is aborted: what it uses is freed only when it has come out.
static void an_abort_ends_a_launch_that_blocks() {
  NcclWorld world({0, 1, 2}, limits(5000, 5000, 5000));
  fakeNcclSetRounds(1'000'000'000);
  std::thread owner([&] {
    while (fakeNcclCalls("GroupEnd") < 2) std::this_thread::yield();  // the first was the init's
    CHECK(!launch_window().try_lock());  // nobody allocates meanwhile what may wait for a device
    world.team->abort("the owner gave up");
  });
  Memories all = seven(world);
  raises(nccl::kSuccess, {"the owner gave up"}, [&] { all_reduce(world, all); });
  owner.join();
  is_aborted(world, nccl::kSuccess, "the owner gave up");
}

// A team of GPUs 1 and 2 makes no context on GPU 0: not when it is closed, nor when its watchdog or its owner aborts
// it.
static void no_context_on_another_gpu() {
  {
    NcclWorld world({1, 2});
    works(world);
    world.team->close();
    CHECK(world.devices->contexts() == (std::set<int>{1, 2}));
  }
  NcclWorld world({1, 2}, limits(5000, 100, 100));
  fakeNcclHold(1, true);
  Memories all = seven(world);
  all_reduce(world, all);
  time_until_aborted();
  is_aborted(world, nccl::kTimeout, "did not end within");
  CHECK(world.devices->contexts() == (std::set<int>{1, 2}));
}

int main() {
  nccl::open({FAKE_NCCL});
  for (const auto& test :
       {inits_that_fail, calls_that_fail, an_invalid_argument_leaves_the_team_usable,
        an_invalid_argument_in_an_aborted_team, an_invalid_argument_that_sticks_does_not,
        an_asynchronous_error_ends_what_waits, a_peer_that_never_comes_meets_the_limit, many_short_ones_are_not_late,
        a_launch_that_never_gets_ready, a_launch_that_goes_on_when_given_up, an_owner_may_abort, a_launch_is_one_group,
        an_abort_ends_a_launch_that_blocks, no_context_on_another_gpu}) {
    fakeNcclReset();
    test();
    CHECK(fakeNcclAlive() == 0);
  }
  return passed();
}
