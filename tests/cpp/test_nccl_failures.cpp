// What goes wrong with NCCL, and what is promised then: the right error with its code and words, a team that is usable
// or says that it is not, and no hang.  Every failure is injected into the fake libnccl.
#include <atomic>
#include <thread>

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
  raises(nccl::kRemoteError, {"failed on rank 2, device 2", "network error"}, make);
  CHECK(fakeNcclAlive() == 0 && fakeNcclAborted() == 3);
  fakeNcclReset();
  HostDevices devices;
  raises(nccl::kTimeout, {"ncclCommInitRankConfig of 2 ranks (ranks 1 of 2) did not end within 0.2 s", "its peers"},
         [&] { nccl::init(devices, nccl::unique_id(), 2, {{1, 0}}, limits(200, 200, 200)); });
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
  const auto start = std::chrono::steady_clock::now();
  while (fakeNcclAlive() > 0 && std::chrono::steady_clock::now() - start < kEnough)
    std::this_thread::sleep_for(milliseconds(5));
  const auto took = std::chrono::steady_clock::now() - start;
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
  fakeNcclSetPolls(1'000'000'000);
  Memories all = seven(world);
  raises(nccl::kTimeout, {"ncclAllReduce(count 7, int32, sum) (ranks 0, 1 of 2) did not end within 0.3 s"},
         [&] { all_reduce(world, all); });
  is_aborted(world, nccl::kTimeout, "did not end within");
  fakeNcclReset();
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

int main() {
  nccl::open({FAKE_NCCL});
  for (const auto& test : {inits_that_fail, calls_that_fail, an_invalid_argument_leaves_the_team_usable,
                           an_invalid_argument_that_sticks_does_not, an_asynchronous_error_ends_what_waits,
                           a_peer_that_never_comes_meets_the_limit, many_short_ones_are_not_late,
                           a_launch_that_never_gets_ready, an_owner_may_abort}) {
    fakeNcclReset();
    test();
    CHECK(fakeNcclAlive() == 0);
  }
  return passed();
}
