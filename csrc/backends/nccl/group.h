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

  // Notes the result of the call for communicator `index`.  After the first failure nothing more should be called: the
  // whole group is dropped.
  bool add(size_t index, Result result) {
    if (accepted(result_) && !accepted(result)) {
      result_ = result;
      failed_ = static_cast<int>(index);
    }
    return accepted(result_);
  }

  // Ends the group and returns the first failure, otherwise the result of ncclGroupEnd.  Afterwards `dropped()` says
  // whether nothing of the group was started.
  Result end() {
    const Result ended = open_ ? api_.GroupEnd() : result_;
    open_ = false;
    dropped_ = !accepted(ended);
    if (accepted(result_)) result_ = ended;
    return result_;
  }
  bool dropped() const { return dropped_; }
  // The index of the communicator whose call failed; -1: the group as a whole.
  int failed() const { return failed_; }

 private:
  const Api& api_;
  Result result_;
  bool open_;
  bool dropped_ = false;
  int failed_ = -1;
};

}  // namespace mgpu::nccl
