// The NCCL of this process, opened at its first use and not before: torch gets the libnccl.so.2 that was loaded first,
// and an older one would break torch's import.
//
// MGPU_CORE_NCCL, if set, is the only path.  Otherwise: the library that is loaded already, the paths of the caller
// (Python knows where pip puts it), the system's.  It is never closed: its threads and its communicators' streams
// outlive us.
#pragma once

#include <string>
#include <vector>

#include "backends/nccl/nccl_api.h"

namespace mgpu::nccl {

// ncclConfig and ncclCommInitRankConfig are as we use them from here on.
constexpr int kMinimumVersion = 21800;

struct Library {
  Api api;
  int version = 0;
  std::string path;
};

// Opens one, or returns the one that is open.  Throws BackendUnavailable that names each path and what was wrong with
// it; the same paths are not tried again.
const Library& open_library(const std::vector<std::string>& candidates = {});

// Null: nobody has asked for it yet, or there is none.
const Library* opened_library();
// What is in use, or why there is none; opens nothing.
std::string library_detail();

// 23007 is 2.30.7, and 2804 is 2.8.4.
std::string version_text(int version);

}  // namespace mgpu::nccl
