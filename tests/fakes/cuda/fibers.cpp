// The threads of a block as fibers of one thread of the host: each runs until it ends, comes to a barrier or sleeps.
// When all that are left have come to a barrier, they go on.  When some sleep and nobody else can run, the grid stops,
// so that others may run, and they wake when it goes on.
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx;

namespace {

constexpr size_t kStackNbytes = 128 * 1024;

enum class State { ready, at_barrier, asleep, ended };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackNbytes]};
  State state = State::ready;
};
using Fibers = std::vector<std::unique_ptr<Fiber>>;

Fibers idle;  // of grids that have ended
ucontext_t scheduler;
Fiber* running;
const std::function<void()>* body_of_all;
std::array<double, 1024> exchanged;
uint64_t clock_ns = 1;

void enter() {
  (*body_of_all)();
  running->state = State::ended;
}

void prepare(Fiber& fiber) {
  fiber.state = State::ready;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackNbytes;
  fiber.context.uc_link = &scheduler;
  makecontext(&fiber.context, enter, 0);
}

void leave(State state) {
  running->state = state;
  swapcontext(&running->context, &scheduler);
}

class Grid {
 public:
  Grid(unsigned blocks, unsigned threads, std::function<void()> body)
      : blocks_(blocks), threads_(threads), body_(std::move(body)) {}
  ~Grid() { std::move(fibers_.begin(), fibers_.end(), std::back_inserter(idle)); }
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  // Returns whether it has ended; otherwise some of its threads sleep.
  bool go_on() {
    for (; block_ < blocks_; ++block_) {
      if (fibers_.empty() || all_are(State::ended)) start();
      while (!all_are(State::ended)) {
        change(State::asleep, State::ready);
        run_ready();
        if (std::any_of(fibers_.begin(), fibers_.end(),
                        [](const auto& fiber) { return fiber->state == State::asleep; }))
          return false;
        change(State::at_barrier, State::ready);
      }
    }
    return true;
  }

 private:
  bool all_are(State state) const {
    return std::all_of(fibers_.begin(), fibers_.end(), [&](const auto& fiber) { return fiber->state == state; });
  }
  void change(State from, State to) {
    for (const auto& fiber : fibers_)
      if (fiber->state == from) fiber->state = to;
  }

  void start() {
    while (fibers_.size() < threads_) {
      if (idle.empty()) idle.push_back(std::make_unique<Fiber>());
      fibers_.push_back(std::move(idle.back()));
      idle.pop_back();
    }
    for (const auto& fiber : fibers_) prepare(*fiber);
  }

  // Every thread that is ready goes on to its next stop.
  void run_ready() {
    blockIdx = dim3(block_);
    body_of_all = &body_;
    for (unsigned thread = 0; thread < threads_; ++thread) {
      if (fibers_[thread]->state != State::ready) continue;
      running = fibers_[thread].get();
      threadIdx = dim3(thread);
      swapcontext(&scheduler, &running->context);
    }
  }

  const unsigned blocks_, threads_;
  const std::function<void()> body_;
  unsigned block_ = 0;
  Fibers fibers_;
};

}  // namespace

void __syncthreads() { leave(State::at_barrier); }

void __nanosleep(unsigned) {
  clock_ns += 1'000'000;  // so that limits end without anybody's waiting for them
  leave(State::asleep);
}

uint64_t fakeGlobalTimer() { return clock_ns; }

double __shfl_down_sync(unsigned, double value, int offset) {
  const unsigned thread = threadIdx.x, lane = thread % 32;
  exchanged[thread] = value;
  __syncthreads();
  const double theirs = lane + offset < 32 ? exchanged[thread + offset] : value;
  __syncthreads();  // before anybody writes there again
  return theirs;
}

std::function<bool()> fakeStartGrid(unsigned blocks, unsigned threads, std::function<void()> body) {
  return [grid = std::make_shared<Grid>(blocks, threads, std::move(body))] { return grid->go_on(); };
}
