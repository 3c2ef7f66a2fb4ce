#include "backends/cpu/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "core/error.h"

namespace mgpu::cpu {
namespace {

// Long enough to catch the next collective of the same step, short enough not to steal a core from torch.
constexpr auto kSpin = std::chrono::microseconds(20);

int processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

int initial_threads() {
  const char* wanted = std::getenv("MGPU_CORE_NUM_THREADS");
  if (wanted == nullptr) return processors();
  int threads = 0;
  const char* end = wanted + std::strlen(wanted);
  const auto read = std::from_chars(wanted, end, threads);
  return read.ec == std::errc() && read.ptr == end && threads > 0 ? threads : processors();  // 1e3 is not 1
}

struct Instance {
  ThreadPool* pool;
  pid_t process;
};
std::atomic<Instance*> current{nullptr};

}  // namespace

ThreadPool::ThreadPool() : threads_(initial_threads()) {}

// No lock here: in a forked child it could be held by a thread that does not exist.  A pool starts its threads at its
// first job, so the loser of a race throws away an empty one.  Pools are never destroyed: at exit their threads sleep.
ThreadPool& ThreadPool::of_this_process() {
  Instance* seen = current.load(std::memory_order_acquire);
  const pid_t process = getpid();
  if (seen && seen->process == process) return *seen->pool;
  auto mine = std::make_unique<Instance>(Instance{new ThreadPool, process});
  if (current.compare_exchange_strong(seen, mine.get(), std::memory_order_acq_rel)) return *mine.release()->pool;
  delete mine->pool;
  return *seen->pool;
}

void ThreadPool::set_num_threads(int threads) {
  require(threads >= 1, "the number of threads must be at least 1, not " + std::to_string(threads));
  threads_.store(threads);
}

void ThreadPool::start_missing_threads() {
  for (; started_ < threads_.load() - 1; ++started_) {
    try {
      std::thread([this, index = started_] { serve(index); }).detach();
    } catch (const std::system_error&) {
      return;  // no more threads are available: the existing ones do the work
    }
  }
}

void ThreadPool::take_tasks() {
  for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) (*task_)(i);
}

void ThreadPool::run(int64_t tasks, const Task& task) {
  std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
  if (!owner || tasks < 2 || threads_.load() < 2) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_missing_threads();
    task_ = &task;
    tasks_ = tasks;
    next_.store(0, std::memory_order_relaxed);
    open_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  work_.notify_all();
  take_tasks();
  std::unique_lock<std::mutex> lock(mutex_);
  open_ = false;  // a thread that wakes up from now on finds nothing to join
  left_.wait(lock, [this] { return inside_ == 0; });
}

// Spins a little, then sleeps, until there is a job newer than `seen` that has room for this thread; joins it.
bool ThreadPool::wait_for_work(int index, uint64_t seen) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (generation_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) {
  }
  std::unique_lock<std::mutex> lock(mutex_);
  work_.wait(lock, [&] { return open_ && generation_.load() != seen && index < threads_.load() - 1; });
  ++inside_;
  return true;
}

void ThreadPool::serve(int index) {
  for (uint64_t seen = 0; wait_for_work(index, seen);) {
    seen = generation_.load();  // cannot change before this thread has left: the caller waits for it
    take_tasks();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--inside_ == 0) left_.notify_one();
  }
}

void parallel_for(int64_t count, Grain grain, const std::function<void(int64_t, int64_t)>& piece) {
  if (count <= grain.serial) {
    if (count > 0) piece(0, count);
    return;
  }
  ThreadPool& pool = ThreadPool::of_this_process();
  // Long pieces keep the memory streams going; two per thread, where there is so much, even out unequal cores.
  const int64_t fair = count / (2 * pool.num_threads());
  const int64_t length = std::clamp(fair, grain.piece, 4 * grain.piece);
  pool.run((count + length - 1) / length, [&](int64_t i) { piece(i * length, std::min(count, (i + 1) * length)); });
}

void parallel_pieces(const std::vector<int64_t>& counts, Grain grain,
                     const std::function<void(size_t, int64_t, int64_t)>& piece) {
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (int64_t count : counts) ends.push_back(total += count);
  parallel_for(total, grain, [&](int64_t begin, int64_t end) {
    size_t job = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; begin < end; ++job) {
      const int64_t start = job ? ends[job - 1] : 0, stop = std::min(end, ends[job]);
      if (begin < stop) piece(job, begin - start, stop - start);
      begin = stop;
    }
  });
}

}  // namespace mgpu::cpu
