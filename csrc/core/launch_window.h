// Keeps allocations that may wait for a device apart from launches on several devices.
//
//   thread A: NCCL launches on GPU 0 ......................... and on GPU 1
//   thread B:              pinned memory: the driver waits for GPU 0's kernel, which waits for GPU 1's
//
// B would hold the driver that A needs.  So A launches in the window, and B allocates outside it.  Both wait for the
// other with a limit: a launch may block for long before its first kernel, and then an allocation does no harm.
#pragma once

#include <chrono>
#include <mutex>
#include <shared_mutex>

namespace mgpu {

constexpr std::chrono::seconds kWindowLimit{1};

// Never destroyed: a thread may still use it while the process ends.
inline std::shared_timed_mutex& launch_window() {
  static auto* window = new std::shared_timed_mutex;
  return *window;
}

using InLaunchWindow = std::shared_lock<std::shared_timed_mutex>;       // launches, together
using OutsideLaunchWindow = std::unique_lock<std::shared_timed_mutex>;  // an allocation, alone

}  // namespace mgpu
