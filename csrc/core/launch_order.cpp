#include "core/launch_order.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/per_process.h"

namespace mgpu {
namespace {

using DeviceKey = std::pair<DeviceOps*, int>;  // the index of a device means something to its own backend alone

struct Order {
  std::mutex mutex;  // held for a look-up only
  std::condition_variable ended;
  std::set<int> launching;
  std::map<DeviceKey, std::vector<Event>> last;
};
Order& order_of_launches() {
  static PerProcess<Order> orders;
  return orders.get();
}

std::vector<int> devices_of(const Streams& streams) {
  std::vector<int> devices;
  for (const Stream& stream : streams) devices.push_back(stream.device);
  return devices;
}

std::vector<Event> last_of(const DeviceKey& device) {
  Order& order = order_of_launches();
  const std::lock_guard<std::mutex> lock(order.mutex);
  const auto found = order.last.find(device);
  return found == order.last.end() ? std::vector<Event>{} : found->second;
}

}  // namespace

// All devices at once or none: two launches that each had one and waited for the other's would wait for ever.
DeviceClaim::DeviceClaim(std::vector<int> devices, Clock::time_point deadline) : devices_(std::move(devices)) {
  Order& order = order_of_launches();
  const auto free = [&] {
    return std::none_of(devices_.begin(), devices_.end(), [&](int device) { return order.launching.count(device); });
  };
  std::unique_lock<std::mutex> lock(order.mutex);
  if (!order.ended.wait_until(lock, deadline, free))
    throw Error("another thread's launch on the same devices did not end in time; nothing was started");
  order.launching.insert(devices_.begin(), devices_.end());
}

DeviceClaim::~DeviceClaim() {
  Order& order = order_of_launches();
  const std::lock_guard<std::mutex> lock(order.mutex);
  for (int device : devices_) order.launching.erase(device);
  order.ended.notify_all();
}

LaunchTurn::LaunchTurn(DeviceOps& ops, const Streams& streams, Clock::time_point deadline)
    : ops_(ops), streams_(streams), claim_(devices_of(streams), deadline) {
  for (const Stream& stream : streams_)
    for (const Event& event : last_of({&ops_, stream.device})) ops_.wait(stream, event);
}

std::vector<Event> LaunchTurn::launched() {
  std::vector<Event> events;
  std::map<DeviceKey, std::vector<Event>> last;  // each rank of a device has a stream of its own
  for (const Stream& stream : streams_) {
    events.push_back(ops_.record(stream));
    last[{&ops_, stream.device}].push_back(events.back());
  }
  Order& order = order_of_launches();
  const std::lock_guard<std::mutex> lock(order.mutex);
  for (auto& [device, recorded] : last) order.last[device] = std::move(recorded);
  return events;
}

void forget_launches(DeviceOps& ops, const std::vector<int>& devices) {
  for (int device : devices) {
    const std::vector<Event> events = last_of({&ops, device});
    if (!std::all_of(events.begin(), events.end(), [&](const Event& event) { return ops.reached(event); })) continue;
    Order& order = order_of_launches();
    const std::lock_guard<std::mutex> lock(order.mutex);
    const auto found = order.last.find({&ops, device});
    if (found != order.last.end() && found->second == events) order.last.erase(found);
  }
}

}  // namespace mgpu
