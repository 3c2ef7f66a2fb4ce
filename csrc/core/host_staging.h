// Copies in host memory, which every device reaches, for devices that do not reach each other.
#pragma once

#include "core/collectives.h"

namespace mgpu {

// Copies of the ranks' inputs, made on the ranks' own streams into staging memory.  The memory is kept until all work
// that was put on the streams of `users` in the life of this object has run, also where an exception ends it.
class StagedCopies {
 public:
  // `wanted` false: nothing is copied, and everybody reads the buffers themselves.
  StagedCopies(DeviceOps& ops, bool wanted, const Streams& users) : ops_(ops), wanted_(wanted), users_(users) {}
  ~StagedCopies();
  StagedCopies(const StagedCopies&) = delete;
  StagedCopies& operator=(const StagedCopies&) = delete;

  // Returns what the others read instead of the buffer.  A buffer without memory is returned as it is.
  Buffer of(const Buffer& buffer, Stream on);
  Buffers of(const Buffers& buffers, const Streams& on);
  // The same for many buffers of one stream: one piece of memory and one call.
  Buffers of_all(const Buffers& buffers, Stream on);
  // Returns staging memory that holds nothing yet.
  Buffer allocate(int64_t count, DType dtype);

 private:
  DeviceOps& ops_;
  const bool wanted_;
  const Streams users_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace mgpu
