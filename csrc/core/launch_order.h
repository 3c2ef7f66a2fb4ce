// Who launches next on a device.  Kernels of NCCL and of push wait for their peers on other devices: two launches that
// share devices deadlock when one device runs the first one's kernel and the other the second one's, each waiting for
// its peer.  So over all threads of the process
//   * one launch at a time touches a device: from before its group is opened until its work is on the streams;
//   * each launch's streams wait for the event after the last launch of their device, so the kernels run in the order
//     in which they were launched.
// A turn is never held while anybody waits for a kernel, and is itself waited for with a limit.  Launches on different
// devices do not wait for each other: they may be two ranks of one communicator, which need each other to get ready.
#pragma once

#include <chrono>
#include <vector>

#include "core/device_ops.h"

namespace mgpu {

using Clock = std::chrono::steady_clock;

// A claim to be the only one that launches on these devices.
class DeviceClaim {
 public:
  // Throws Error when another launch does not end by `deadline`.
  DeviceClaim(std::vector<int> devices, Clock::time_point deadline);
  ~DeviceClaim();
  DeviceClaim(const DeviceClaim&) = delete;
  DeviceClaim& operator=(const DeviceClaim&) = delete;

 private:
  const std::vector<int> devices_;
};

class LaunchTurn {
 public:
  // Waits for the devices; then the streams wait for the devices' last launches.
  LaunchTurn(DeviceOps& ops, const Streams& streams, Clock::time_point deadline);
  // The work is on the streams: returns the event after it on each, for which the devices' next launches wait.
  std::vector<Event> launched();

 private:
  DeviceOps& ops_;
  const Streams streams_;
  const DeviceClaim claim_;
};

// Lets go of the events of devices on which nothing runs any more.
void forget_launches(DeviceOps& ops, const std::vector<int>& devices);

}  // namespace mgpu
