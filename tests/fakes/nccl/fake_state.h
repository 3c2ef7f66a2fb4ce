// What the fake libnccl knows: communicators, their parts of collectives, and what a test has asked for.  One lock
// guards all of it; work is handed to streams without it, because a stream may run it at once.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

struct ncclUniqueId {
  char internal[128];
};

namespace fake_nccl {

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;
enum Code { kOk, kCudaError, kSystemError, kInternalError, kArgument, kUsage, kRemoteError, kInProgress };
enum class Kind { all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, receive };

struct Comm;
struct Clique;

// One rank's part of one operation.
struct Part {
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  int dtype;
  int op;
  int root;  // or the peer of a message
  bool arrived = false;
  bool done = false;
  bool message() const { return kind == Kind::send || kind == Kind::receive; }
};

// All parts of a communicator in one group: NCCL runs them as one piece of work, so a send and a receive of one group
// do not wait for each other.
struct Work {
  Comm* comm;
  void* stream;
  std::vector<std::unique_ptr<Part>> parts;
  Clock::time_point since{};  // the stream got there
};

struct Comm {
  std::shared_ptr<Clique> clique;
  int rank;
  int device;
  int init_code;          // what its init ends with
  bool ready = false;     // its init has ended
  bool gone = false;      // destroyed or aborted; its memory stays, so that a second destroy is seen
  bool aborting = false;  // what waits in it gives up
  bool finalized = false;
  int async = kOk;
  int rounds_left = 0;
  int inside = 0;  // threads that are in ncclGroupEnd with it
};

struct Clique {
  int ranks = 0;
  std::vector<Comm*> comms;                                          // by rank; null: not there yet
  std::vector<std::deque<Part*>> parts;                              // of collectives, in the order of the calls
  std::map<std::pair<int, int>, std::deque<Part*>> sends, receives;  // by sender and receiver
};

// Who has a group open over a device: from its first operation until its work is on the streams.
struct Opened {
  std::thread::id thread;
  int comms;
};

struct State {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by unique id
  std::vector<std::unique_ptr<Comm>> comms;
  std::set<Comm*> alive;
  std::vector<std::unique_ptr<Work>> works;  // on streams
  std::map<int, Opened> opened;
  std::map<std::string, std::pair<int, int>> failures;  // operation -> calls left, code
  std::map<int, int> init_failures;
  std::map<int, bool> held;
  std::set<std::string> blocked;
  std::map<std::string, long> calls;
  long ids = 0;
  int aborted = 0;
  int rounds = 0;
  int p2p_disabled = -1;  // -1: no communicator was made yet
  std::chrono::milliseconds timeout{20'000};
  void (*enqueue)(void*, bool (*)(void*), void*) = nullptr;
  int (*current_device)() = nullptr;
  void (*set_device)(int) = nullptr;
};
State& state();

// What ncclGetLastError says in this thread; `fail` sets it and returns the code.
const char* last_error();
int fail(int code, const std::string& text);

// Sets the current device back, as cudaGetDevice and cudaSetDevice would.
class DeviceSetBack {
 public:
  DeviceSetBack() : found_(state().current_device ? state().current_device() : 0) {}
  ~DeviceSetBack() {
    if (state().set_device) state().set_device(found_);
  }

 private:
  const int found_;
};

// With the lock held.
int counted(const char* operation);  // a call; returns what a test wants it to return
void register_work(Work& work);
bool advance(Work& work);  // its stream is there; whether it is finished
bool all_done(const Work& work);
void drop_work(const Comm& comm);  // of a communicator that is gone
void close_device(const Comm& comm);
inline bool known(Comm* comm) { return state().alive.count(comm) > 0; }

// The calling thread's group: what its end does with a communicator.  Outside a group that is a failure.
enum class AtEnd { init, finalize, destroy, abort };
int at_group_end(AtEnd what, Comm* comm);
void fail_group(int code);
int group_depth();

// What ncclGroupEnd does, without the lock: waits for an init, or until a communicator's work is done.
int finish_init(Comm& comm);
int finish_work(Comm& comm);
// Takes some rounds, as a launch does that waits for its peers, and puts the work on its stream.
int launch(std::unique_ptr<Work> work);
// With the lock: the communicator is no more.
void end_comm(Comm& comm);

// Moves the data of one operation; the lists have one part per rank.  False: the ranks do not agree.
bool run_collective(const std::vector<Part*>& parts);
bool run_message(const Part& send, const Part& receive);

}  // namespace fake_nccl
