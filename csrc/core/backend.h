// What each backend of devices tells the registry (backends.cpp): its name, what the machine offers, and its DeviceOps.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/device_ops.h"

namespace mgpu {

struct Backend {
  const char* name;
  bool built;               // is it in this build?
  std::string (*detail)();  // its version and the like, or why it is missing

  // Throws BackendUnavailable where the backend is not built.
  DeviceOps& (*device_ops)();
  // Whether work on `device` may read and write the memory of `peer`, and the other way round.
  bool (*reach)(int device, int peer);

  // Devices that can be used.  0 where the backend is not built, without a driver, or with one too old for this build.
  int (*device_count)();
  // 13000 is version 13.0; 0: there is none.
  int (*runtime_version)();
  int (*driver_version)();
  // Whether this build has code that the device runs.
  bool (*has_code_for)(int device);
  // Throws InvalidArgument, which calls the memory `name`, unless the device reaches it.  The other functions trust the
  // pointers that they are given.
  void (*check_memory)(const void* pointer, int device, const std::string& name);
  // Lets work on the first of each pair touch the memory of the second.  A test must have shown that it works.
  void (*allow_peers)(const std::vector<std::pair<int, int>>& device_and_peer);
};

}  // namespace mgpu
