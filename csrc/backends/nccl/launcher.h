// One thread of a team that makes its calls of NCCL, so that a caller who waits for one can give it up.
//
//   caller                              the launcher's thread
//   start(call)            ------->     GroupStart ... GroupEnd     blocks as long as NCCL likes
//   wait_until(deadline)   <-------     done
//
// Communicators are blocking: those that are not have NCCL start a thread for each group (2.23 and later), and have
// to be polled.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace mgpu::nccl {

class Launcher {
 public:
  // Throws Error where the process can have no more threads.
  Launcher();
  // The thread ends after its call, whenever that is.
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // One call at a time.  It may outlive the caller's wait, so it owns what it uses, and it does not throw.
  void start(std::function<void()> call);
  // Waits until no call is running.  Returns false if one still is at the deadline.
  bool wait_until(std::chrono::steady_clock::time_point deadline) const;
  // Returns a function that waits without limit, for a thread that may outlive the launcher.
  std::function<void()> waiting() const;

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> call;  // while it waits or runs
    bool ending = false;
  };
  static void serve(const std::shared_ptr<Shared>& shared);
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace mgpu::nccl
