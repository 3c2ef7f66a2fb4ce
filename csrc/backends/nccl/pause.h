// A wait for something that can only be polled: eagerly at first, because most answers come within microseconds, then
// less and less often.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace mgpu::nccl {

class Pause {
 public:
  void next() {
    if (++turns_ <= kEager) {
      sched_yield();
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(20 * (turns_ - kEager), 2000)));
  }

 private:
  static constexpr int kEager = 100;
  int turns_ = 0;
};

}  // namespace mgpu::nccl
