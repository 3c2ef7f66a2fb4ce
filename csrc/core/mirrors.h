// Copies in host memory, which every device reaches.
#pragma once

#include "core/collectives.h"

namespace mgpu {

// The inputs of ranks, or copies of them, made on the ranks' own streams.  The copies live until what is on the streams
// of `users` has run, all that was put there in the life of this object: also where an exception ends it.
class Mirrors {
 public:
  Mirrors(DeviceOps& ops, bool wanted, const Streams& users) : ops_(ops), wanted_(wanted), users_(users) {}
  ~Mirrors();
  Mirrors(const Mirrors&) = delete;
  Mirrors& operator=(const Mirrors&) = delete;

  bool wanted() const { return wanted_; }
  // What the others read in its place.  A buffer without memory stays one.
  Buffer of(const Buffer& buffer, Stream on);
  Buffers of(const Buffers& buffers, const Streams& on);
  // Many that one stream has, in one piece of memory and by one copy.
  Buffers of_all(const Buffers& buffers, Stream on);
  // Room without contents.
  Buffer room(int64_t count, DType dtype);

 private:
  DeviceOps& ops_;
  const bool wanted_;
  const Streams users_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace mgpu
