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
  int init_code;       // what its init ends with
  bool ready = false;  // its init has ended
  bool gone = false;   // destroyed or aborted; its memory stays, so that a second destroy is seen
  bool finalized = false;
  int async = kOk;
  int polls_left;
  std::vector<std::unique_ptr<Work>> pending;  // launched, not yet on their streams
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
  std::map<std::string, long> calls;
  long ids = 0;
  int aborted = 0;
  int polls = 1;
  std::chrono::milliseconds timeout{20'000};
  void (*enqueue)(void*, bool (*)(void*), void*) = nullptr;
  int (*current_device)() = nullptr;
};
State& state();

// What ncclGetLastError says in this thread; `fail` sets it and returns the code.
const char* last_error();
int fail(int code, const std::string& text);

// With the lock held.
int counted(const char* operation);  // a call; returns what a test wants it to return
void register_work(Work& work);
bool advance(Work& work);  // its stream is there; whether it is finished
bool all_done(const Work& work);
void drop_work(const Comm& comm);  // of a communicator that is gone
void close_device(const Comm& comm);
inline bool known(Comm* comm) { return state().alive.count(comm) > 0; }

// The calling thread's group.
void fail_group(int code);
int group_depth();

// Moves the data of one operation; the lists have one part per rank.  False: the ranks do not agree.
bool run_collective(const std::vector<Part*>& parts);
bool run_message(const Part& send, const Part& receive);

}  // namespace fake_nccl
