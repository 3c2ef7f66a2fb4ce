// Copies in host memory, which every device reaches.
#pragma once

#include "core/collectives.h"

namespace mgpu {

// The inputs of the ranks, or their copies in host memory, made on the ranks' own streams.
class Mirrors {
 public:
  Mirrors(DeviceOps& ops, bool wanted) : ops_(ops), wanted_(wanted) {}

  bool wanted() const { return wanted_; }
  // What the others read in its place.  A buffer without memory stays one.
  Buffer of(const Buffer& buffer, Stream on);
  Buffers of(const Buffers& buffers, const Streams& on);
  // Room without contents.
  Buffer room(const Buffer& like);
  // The copies live until what is on these streams now has run.
  void keep(const Streams& readers);

 private:
  DeviceOps& ops_;
  const bool wanted_;
  std::vector<std::shared_ptr<void>> memory_;
};

}  // namespace mgpu
