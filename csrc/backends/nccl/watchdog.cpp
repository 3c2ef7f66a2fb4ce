#include "backends/nccl/watchdog.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/per_process.h"

namespace mgpu::nccl {
namespace {

// A hang lasts minutes before anybody gives up; looking fifty times a second costs next to nothing.
constexpr auto kPeriod = std::chrono::milliseconds(20);
// A look takes microseconds, but an abort may take longer; the process does not wait for ever to end.
constexpr auto kLastLook = std::chrono::seconds(2);

class Watchdog {
 public:
  static Watchdog& of_this_process();
  void add(Watched* watched);
  void remove(Watched* watched);
  void wake();
  void stop();

 private:
  void serve();
  bool sleep(bool busy);
  bool look_at_all();
  bool look_at(Watched* watched);
  bool watches(Watched* watched) const { return std::count(all_.begin(), all_.end(), watched) > 0; }

  std::mutex mutex_;  // not held while a team is looked at
  std::condition_variable woken_;
  std::condition_variable looked_;
  std::vector<Watched*> all_;
  Watched* looking_at_ = nullptr;
  bool running_ = false;
  bool wake_ = false;
  bool ending_ = false;
};

Watchdog& Watchdog::of_this_process() {
  static PerProcess<Watchdog> watchdogs;
  return watchdogs.get();
}

// Runs before the destructors of what was loaded earlier, NCCL's among them.
void stop_at_exit() { Watchdog::of_this_process().stop(); }

void Watchdog::add(Watched* watched) {
  static const bool once = std::atexit(stop_at_exit) == 0;
  (void)once;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!running_ && !ending_) {
    try {
      std::thread([this] { serve(); }).detach();
      running_ = true;
    } catch (const std::system_error& error) {
      throw Error(std::string("no thread to watch over a team of NCCL: ") + error.what());
    }
  }
  all_.push_back(watched);
}

// The team that is being looked at now must live until that has ended.
void Watchdog::remove(Watched* watched) {
  std::unique_lock<std::mutex> lock(mutex_);
  all_.erase(std::remove(all_.begin(), all_.end(), watched), all_.end());
  looked_.wait(lock, [&] { return looking_at_ != watched; });
  wake_ = true;  // it may have been the last one
  woken_.notify_one();
}

void Watchdog::wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  wake_ = true;
  woken_.notify_one();
}

void Watchdog::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  ending_ = true;
  woken_.notify_one();
  looked_.wait_for(lock, kLastLook, [this] { return !looking_at_; });
}

// Waits until it is time to look.  Returns false where no team is left, and then the thread ends.
bool Watchdog::sleep(bool busy) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (busy)
    woken_.wait_for(lock, kPeriod, [this] { return ending_; });
  else
    woken_.wait(lock, [this] { return wake_ || ending_; });
  wake_ = false;
  running_ = !ending_ && !all_.empty();
  return running_;
}

bool Watchdog::look_at(Watched* watched) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ending_ || !watches(watched)) return false;
    looking_at_ = watched;
  }
  const bool busy = watched->look();
  const std::lock_guard<std::mutex> lock(mutex_);
  looking_at_ = nullptr;
  looked_.notify_all();
  return busy;
}

bool Watchdog::look_at_all() {
  std::vector<Watched*> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all = all_;
  }
  bool busy = false;
  for (Watched* watched : all) busy |= look_at(watched);
  return busy;
}

void Watchdog::serve() {
  for (bool busy = true; sleep(busy);) busy = look_at_all();
}

}  // namespace

void watch(Watched& watched) { Watchdog::of_this_process().add(&watched); }
void unwatch(Watched& watched) noexcept { Watchdog::of_this_process().remove(&watched); }
void wake_watchdog() { Watchdog::of_this_process().wake(); }

}  // namespace mgpu::nccl
