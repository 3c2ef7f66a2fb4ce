#include "backends/cuda/memory.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "backends/cuda/guard.h"
#include "core/launch_window.h"

namespace mgpu::cuda {
namespace {

// The object that an Event of this backend points to.
struct DeviceEvent {
  int device;
  cudaEvent_t handle;
};
const DeviceEvent& device_event(const Event& event) { return *static_cast<const DeviceEvent*>(event.get()); }

using Kept = std::pair<Event, std::shared_ptr<void>>;

struct Idle {
  void* memory;
  int64_t size;
  int64_t since;  // the number of requests when it came back
};

// Nothing here is ever destroyed: at exit the driver may be gone before we are, and it takes all with it.
struct Pools {
  std::mutex mutex;
  std::map<int, std::vector<cudaEvent_t>> events;          // per device
  std::map<std::pair<int, void*>, std::deque<Kept>> kept;  // per stream, in its order
  std::vector<std::shared_ptr<void>> of_graphs;
  std::deque<Idle> idle;  // pinned memory, the longest unused first
  int64_t idle_nbytes = 0;
  int64_t in_use_nbytes = 0;  // pinned memory, without that of graphs
  int64_t requests = 0;
};
Pools& pools() {
  static auto* it = new Pools;
  return *it;
}

// Another thread may be capturing a graph in a mode that forbids all threads to query events or to allocate.  Our calls
// are no part of the capture, so this allows them meanwhile.
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

// Few sizes, so that memory of one serves many requests: multiples of 16 KiB up to 128 KiB, then four for each power of
// two.  From 64 KiB on at most a quarter is wasted.
int64_t rounded(int64_t nbytes) {
  int64_t step = 16 * 1024;
  while (8 * step < nbytes) step *= 2;
  return std::max<int64_t>(1, (nbytes + step - 1) / step) * step;
}

// Frees blocks that were idle for long, then the longest unused ones until a new block fits the limit.
void free_idle(int64_t more) {
  std::vector<void*> freed;
  {
    Pools& all = pools();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto too_much = [&] { return all.in_use_nbytes + all.idle_nbytes + more > kMostPinnedNbytes; };
    while (!all.idle.empty() && (too_much() || all.requests - all.idle.front().since > kIdleRequests)) {
      freed.push_back(all.idle.front().memory);
      all.idle_nbytes -= all.idle.front().size;
      all.idle.pop_front();
    }
  }
  if (freed.empty()) return;
  const OutsideLaunchWindow window(launch_window(), kWindowLimit);
  cudaError_t failed = cudaSuccess;  // the others are freed all the same
  for (void* memory : freed)
    if (const cudaError_t code = cudaFreeHost(memory)) failed = code;
  check(failed, "cudaFreeHost");
}

void* allocate_pinned(int64_t size) {
  const OutsideLaunchWindow window(launch_window(), kWindowLimit);
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, static_cast<size_t>(size), cudaHostAllocPortable), "cudaHostAlloc");
  return memory;
}

bool leaves_no_room(int64_t size) {
  const std::lock_guard<std::mutex> lock(pools().mutex);
  return pools().in_use_nbytes + size > kMostPinnedNbytes;
}

// Returns an owner that makes the memory idle at its end.
std::shared_ptr<void> owned(void* memory, int64_t size, bool counts) {
  const int64_t counted = counts ? size : 0;
  std::unique_lock<std::mutex> lock(pools().mutex);
  ++pools().requests;
  pools().in_use_nbytes += counted;
  lock.unlock();
  return {memory, [size, counted](void* returned) {
            const std::lock_guard<std::mutex> lock(pools().mutex);
            pools().in_use_nbytes -= counted;
            pools().idle_nbytes += size;
            pools().idle.push_back({returned, size, pools().requests});
          }};
}

// Returns null where none of that size is idle.
std::shared_ptr<void> take_idle(int64_t size, bool counts) {
  std::unique_lock<std::mutex> lock(pools().mutex);
  auto& idle = pools().idle;
  const auto found = std::find_if(idle.rbegin(), idle.rend(), [&](const Idle& each) { return each.size == size; });
  if (found == idle.rend()) return nullptr;
  void* memory = found->memory;
  pools().idle_nbytes -= size;
  idle.erase(std::next(found).base());
  lock.unlock();
  return owned(memory, size, counts);
}

// Returns whether the event has certainly been reached.  An error of earlier work is not reported here.
bool passed(const Kept& kept) {
  const DeviceEvent& event = device_event(kept.first);
  const DeviceGuard guard(event.device);
  const cudaError_t code = cudaEventQuery(event.handle);
  if (code != cudaSuccess) cudaGetLastError();
  return code == cudaSuccess;
}

// Removes and returns the memory that no stream needs any more.  A stream passes its events in order.
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

// Waits on the host until each stream is done with the memory that it has held the longest.  Returns false if they hold
// none.  Only the caller's streams: those of another thread may wait for work that this thread has yet to launch.
bool wait_for_oldest(const Streams& users) {
  std::vector<Event> events;
  {
    const std::lock_guard<std::mutex> lock(pools().mutex);
    for (const Stream& user : users) {
      if (user.on_host()) continue;
      const auto found = pools().kept.find({user.device, user.handle});
      if (found != pools().kept.end() && !found->second.empty()) events.push_back(found->second.front().first);
    }
  }
  for (const Event& event : events) wait_for_event({}, event);
  return !events.empty();
}

}  // namespace

bool is_capturing(Stream on) {
  if (on.on_host()) return false;
  const DeviceGuard guard(on.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle_of(on), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

Event record_event(Stream on) {
  const DeviceGuard guard(on.device);
  Event event = new_event(on.device);
  check(cudaEventRecord(device_event(event).handle, handle_of(on)), "cudaEventRecord");
  return event;
}

void wait_for_event(Stream on, const Event& event) {
  const DeviceEvent& awaited = device_event(event);
  const DeviceGuard guard(on.on_host() ? awaited.device : on.device);
  if (on.on_host()) {
    const OutsideCaptures outside;
    return check(cudaEventSynchronize(awaited.handle), "cudaEventSynchronize");
  }
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

std::shared_ptr<void> pinned(int64_t nbytes, const Streams& users) {
  const auto gpu = std::find_if(users.begin(), users.end(), [](Stream each) { return !each.on_host(); });
  const DeviceGuard guard(gpu->device);  // otherwise the runtime makes a context on device 0 for this
  const bool of_graph = std::any_of(users.begin(), users.end(), is_capturing);
  const OutsideCaptures outside;
  const int64_t size = rounded(nbytes);
  take_passed();  // they end here, outside the lock that their ends take
  std::shared_ptr<void> memory = take_idle(size, !of_graph);
  while (!memory && !of_graph && leaves_no_room(size) && wait_for_oldest(users)) {
    take_passed();
    memory = take_idle(size, !of_graph);
  }
  if (!of_graph) free_idle(memory ? 0 : size);
  return memory ? memory : owned(allocate_pinned(size), size, !of_graph);
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
