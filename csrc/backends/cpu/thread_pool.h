// A small pool that survives fork.  OpenMP and a plain pool both hang in a forked child (DataLoader workers fork):
// their threads are gone there and their locks may be held by nobody.  Ours belongs to a process id; a child makes a
// new one and never touches the old.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace mgpu::cpu {

class ThreadPool {
 public:
  using Task = std::function<void(int64_t)>;

  static ThreadPool& of_this_process();

  // Calls task(0) ... task(tasks - 1), each once, and returns when all have ended.  Tasks must not throw.
  // The caller works too, and waits only for threads that have taken a task: one that is still asleep costs nothing.
  // While another thread runs something here, the caller does all its tasks alone, so nobody ever waits for the pool.
  void run(int64_t tasks, const Task& task);

  int num_threads() const { return threads_.load(); }
  void set_num_threads(int threads);

 private:
  ThreadPool();
  void start_missing_threads();
  void serve(int index);
  void take_tasks();
  bool wait_for_work(int index, uint64_t seen);

  std::mutex owner_;  // held by the one caller whose job is open
  std::mutex mutex_;  // guards all below that is not atomic
  std::condition_variable work_;
  std::condition_variable left_;
  std::atomic<int> threads_;
  int started_ = 0;                      // threads that exist, without the caller
  std::atomic<uint64_t> generation_{0};  // grows with every job
  bool open_ = false;                    // a job takes helpers
  int inside_ = 0;                       // helpers in the open job
  const Task* task_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int64_t> next_{0};
};

// How work is divided: up to `serial` the caller does all of it; beyond, pieces have at least `piece`.
struct Grain {
  int64_t serial;
  int64_t piece;
};

// Splits [0, count) into pieces and calls piece(begin, end) of each.
void parallel_for(int64_t count, Grain grain, const std::function<void(int64_t, int64_t)>& piece);

// Many jobs as one loop: job i has counts[i] of whatever is counted; calls piece(i, begin, end) within each.
void parallel_pieces(const std::vector<int64_t>& counts, Grain grain,
                     const std::function<void(size_t, int64_t, int64_t)>& piece);

}  // namespace mgpu::cpu
