#include "backends/cuda/memory.h"

#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "backends/cuda/guard.h"

namespace mgpu::cuda {
namespace {

// What an Event points at.
struct DeviceEvent {
  int device;
  cudaEvent_t handle;
};
const DeviceEvent& device_event(const Event& event) { return *static_cast<const DeviceEvent*>(event.get()); }

using Kept = std::pair<Event, std::shared_ptr<void>>;

// Nothing here is ever destroyed: at exit the driver may be gone before we are, and it takes all with it.
struct Pools {
  std::mutex mutex;
  std::map<int, std::vector<cudaEvent_t>> events;          // per device
  std::map<int64_t, std::vector<void*>> pinned;            // per size
  std::map<std::pair<int, void*>, std::deque<Kept>> kept;  // per stream, in its order
  std::vector<std::shared_ptr<void>> of_graphs;
};
Pools& pools() {
  static auto* it = new Pools;
  return *it;
}

// Another thread may be capturing a graph, in a mode that forbids everybody what has no part in it: asking for an
// event, allocating.  Ours has none.
class OutsideCaptures {
 public:
  OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The device is current.
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
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

Event new_event(int device) {
  return {new DeviceEvent{device, take_event(device)}, [](void* owned) {
            const std::unique_ptr<DeviceEvent> event(static_cast<DeviceEvent*>(owned));
            const std::lock_guard<std::mutex> lock(pools().mutex);
            pools().events[event->device].push_back(event->handle);
          }};
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
  const OutsideCaptures outside;
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, static_cast<size_t>(size), cudaHostAllocPortable), "cudaHostAlloc");
  return memory;
}

// Whether it is certain; an error of somebody else's work is none of ours.
bool passed(const Kept& kept) {
  const DeviceEvent& event = device_event(kept.first);
  const DeviceGuard guard(event.device);
  const cudaError_t code = cudaEventQuery(event.handle);
  if (code != cudaSuccess) cudaGetLastError();
  return code == cudaSuccess;
}

// Takes out what no stream needs any more: of each stream the first ones, because it passes them in order.
std::vector<Kept> take_passed() {
  std::vector<Kept> all;
  const OutsideCaptures outside;
  const std::lock_guard<std::mutex> lock(pools().mutex);
  for (auto& [stream, kept] : pools().kept)
    while (!kept.empty() && passed(kept.front())) {
      all.push_back(std::move(kept.front()));
      kept.pop_front();
    }
  return all;
}

bool is_capturing(Stream on) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle_of(on), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

Event record_event(Stream on) {
  const DeviceGuard guard(on.device);
  Event event = new_event(on.device);
  check(cudaEventRecord(device_event(event).handle, handle_of(on)), "cudaEventRecord");
  return event;
}

void wait_for_event(Stream on, const Event& event) {
  const DeviceEvent& awaited = device_event(event);
  const DeviceGuard guard(on.device == kHost ? awaited.device : on.device);
  if (on.device == kHost) return check(cudaEventSynchronize(awaited.handle), "cudaEventSynchronize");
  check(cudaStreamWaitEvent(handle_of(on), awaited.handle, 0), "cudaStreamWaitEvent");
}

bool event_reached(const Event& event) {
  const DeviceGuard guard(device_event(event).device);
  const OutsideCaptures outside;
  const cudaError_t code = cudaEventQuery(device_event(event).handle);
  if (code != cudaErrorNotReady) check(code, "cudaEventQuery");
  if (code != cudaSuccess) cudaGetLastError();
  return code == cudaSuccess;
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
  const bool for_good = is_capturing(on);  // a graph uses it at every replay
  const Event event = for_good ? nullptr : record_event(on);
  const std::lock_guard<std::mutex> lock(pools().mutex);
  if (for_good) return pools().of_graphs.push_back(std::move(memory));
  pools().kept[{on.device, on.handle}].emplace_back(event, std::move(memory));
}

}  // namespace mgpu::cuda
