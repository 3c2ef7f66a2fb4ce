// One object per process.  A forked child has none of its parent's threads, and a lock may be held there by one of
// them: so a child makes a new object and never touches the old one.  Objects are never destroyed: a thread may still
// use one while the process ends.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <memory>

namespace mgpu {

template <class T>
class PerProcess {
 public:
  // No lock, for the same reason.  The loser of a race throws away an object that nobody has seen.
  T& get() {
    Instance* seen = current_.load(std::memory_order_acquire);
    const pid_t process = getpid();
    if (seen && seen->process == process) return *seen->value;
    auto mine = std::make_unique<Instance>(Instance{std::make_unique<T>(), process, seen});
    if (current_.compare_exchange_strong(seen, mine.get(), std::memory_order_acq_rel)) return *mine.release()->value;
    return *seen->value;
  }

 private:
  struct Instance {
    std::unique_ptr<T> value;
    pid_t process;
    Instance* parents;  // not lost, so that leak checkers keep silent
  };
  std::atomic<Instance*> current_{nullptr};
};

}  // namespace mgpu
