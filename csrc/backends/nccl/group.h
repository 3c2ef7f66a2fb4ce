// A group of NCCL calls that cannot be left open: whatever happens in between, ncclGroupEnd is called.  A thread that
// forgot it would put all its later calls, of other teams too, into a group that never starts.
#pragma once

#include <cstddef>
#include <string>

#include "backends/nccl/nccl_api.h"

namespace mgpu::nccl {

// NCCL's own text about the last failure; empty where it has none.
inline std::string last_error(const Api& api) {
  const char* last = api.GetLastError(nullptr);
  return last ? last : "";
}

class Group {
 public:
  explicit Group(const Api& api) : api_(api), result_(api.GroupStart()), open_(result_ == kSuccess) {}
  ~Group() {
    if (open_) api_.GroupEnd();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Takes the result of the part of communicator `place`.  After the first failure nothing more should be called:
  // the group is dropped whole.
  bool add(size_t place, Result result) {
    if (accepted(result_) && !accepted(result)) {
      result_ = result;
      failed_ = static_cast<int>(place);
    }
    return accepted(result_);
  }

  // Ends the group.  The first failure, else what ncclGroupEnd says.  `dropped()` says afterwards whether nothing of
  // the group was started.
  Result end() {
    const Result ended = open_ ? api_.GroupEnd() : result_;
    open_ = false;
    dropped_ = !accepted(ended);
    if (accepted(result_)) result_ = ended;
    return result_;
  }
  bool dropped() const { return dropped_; }
  // The place whose call failed; -1: the group as a whole.
  int failed() const { return failed_; }

 private:
  const Api& api_;
  Result result_;
  bool open_;
  bool dropped_ = false;
  int failed_ = -1;
};

}  // namespace mgpu::nccl
