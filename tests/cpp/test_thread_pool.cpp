#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "backends/cpu/thread_pool.h"
#include "check.h"
#include "core/error.h"

using mgpu::cpu::ThreadPool;

static void each_task_once(ThreadPool& pool) {
  for (int tasks : {0, 1, 2, 3, 100}) {
    std::vector<std::atomic<int>> done(100);
    pool.run(tasks, [&](int64_t i) { ++done[i]; });
    for (int i = 0; i < 100; ++i) CHECK(done[i] == (i < tasks ? 1 : 0));
  }
}

static void many_callers(ThreadPool& pool) {
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int k = 0; k < 200; ++k) pool.run(7, [&](int64_t) { ++total; });
    });
  for (auto& caller : callers) caller.join();
  CHECK(total == 4 * 200 * 7);
}

static void inside_a_task(ThreadPool& pool) {
  std::atomic<int> total{0};
  pool.run(4, [&](int64_t) { ThreadPool::of_this_process().run(3, [&](int64_t) { ++total; }); });
  CHECK(total == 12);
}

static void pieces() {
  for (int64_t count : {int64_t{0}, int64_t{5}, int64_t{10}, int64_t{11}, int64_t{1000}}) {
    std::vector<std::atomic<int>> seen(1000);
    mgpu::cpu::parallel_for(count, {10, 10}, [&](int64_t begin, int64_t end) {
      CHECK(begin < end);
      for (int64_t i = begin; i < end; ++i) ++seen[i];
    });
    for (int64_t i = 0; i < 1000; ++i) CHECK(seen[i] == (i < count ? 1 : 0));
  }
}

// A child of fork has no thread of its parent: its pool must be another one.
[[maybe_unused]] static void after_fork() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::atomic<int> total{0};
    ThreadPool::of_this_process().run(50, [&](int64_t) { ++total; });
    _exit(total == 50 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main() {
  ThreadPool& pool = ThreadPool::of_this_process();
  CHECK(&pool == &ThreadPool::of_this_process());
  for (int threads : {4, 1, 2, 8}) {
    pool.set_num_threads(threads);
    CHECK(pool.num_threads() == threads);
    each_task_once(pool);
    many_callers(pool);
    inside_a_task(pool);
    pieces();
  }
#ifndef __SANITIZE_THREAD__  // it refuses threads in a child of a process with threads
  after_fork();
#endif
  CHECK_THROWS(mgpu::InvalidArgument, "at least 1", pool.set_num_threads(0));
  return passed();
}
