#include "backends/cuda/memory.h"

#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "backends/cuda/guard.h"

namespace mgpu::cuda {
namespace {

// Nothing here is ever destroyed: at exit the driver may be gone before we are, and it takes all with it.
struct Pools {
  std::mutex mutex;
  std::map<int, std::vector<cudaEvent_t>> events;            // per device
  std::map<int64_t, std::vector<void*>> pinned;              // per size
  std::deque<std::pair<Event, std::shared_ptr<void>>> kept;  // until their events are reached
};
Pools& pools() {
  static auto* it = new Pools;
  return *it;
}

cudaEvent_t take_event(int device) {
  {
    const std::lock_guard<std::mutex> lock(pools().mutex);
    auto& idle = pools().events[device];
    if (!idle.empty()) {
      const cudaEvent_t event = idle.back();
      idle.pop_back();
      return event;
    }
  }
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

// Sizes are powers of two from 64 KiB on, so that a pool of one size serves many requests.
int64_t rounded(int64_t nbytes) {
  int64_t size = 64 * 1024;
  while (size < nbytes) size *= 2;
  return size;
}

void* take_pinned(int64_t size) {
  {
    const std::lock_guard<std::mutex> lock(pools().mutex);
    auto& idle = pools().pinned[size];
    if (!idle.empty()) {
      void* memory = idle.back();
      idle.pop_back();
      return memory;
    }
  }
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, static_cast<size_t>(size), cudaHostAllocPortable), "cudaHostAlloc");
  return memory;
}

using Kept = std::pair<Event, std::shared_ptr<void>>;

// Takes out what no stream needs any more.
std::vector<Kept> take_passed() {
  std::vector<Kept> passed;
  const std::lock_guard<std::mutex> lock(pools().mutex);
  auto& kept = pools().kept;
  for (auto each = kept.begin(); each != kept.end();) {
    if (cudaEventQuery(static_cast<cudaEvent_t>(each->first.get())) == cudaErrorNotReady) {
      cudaGetLastError();
      ++each;
      continue;
    }
    passed.push_back(std::move(*each));
    each = kept.erase(each);
  }
  return passed;
}

}  // namespace

Event new_event(int device) {
  return {take_event(device), [device](void* event) {
            const std::lock_guard<std::mutex> lock(pools().mutex);
            pools().events[device].push_back(static_cast<cudaEvent_t>(event));
          }};
}

std::shared_ptr<void> pinned(int64_t nbytes) {
  take_passed();  // they end here, outside the lock that their ends take
  const int64_t size = rounded(nbytes);
  return {take_pinned(size), [size](void* memory) {
            const std::lock_guard<std::mutex> lock(pools().mutex);
            pools().pinned[size].push_back(memory);
          }};
}

void keep_pinned(Stream on, std::shared_ptr<void> memory) {
  const DeviceGuard guard(on.device);
  const Event event = new_event(on.device);
  check(cudaEventRecord(static_cast<cudaEvent_t>(event.get()), handle_of(on)), "cudaEventRecord");
  const std::lock_guard<std::mutex> lock(pools().mutex);
  pools().kept.emplace_back(event, std::move(memory));
}

}  // namespace mgpu::cuda
