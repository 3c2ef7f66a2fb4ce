// Scatter and gather, over DeviceOps.  A dense tensor that is cut along one dimension is, in memory, `outer` runs of
// (rows of that dimension x `inner_nbytes`); a chunk is a rectangle of it.  So cutting along dim > 0 is a strided copy
// straight from the source, with no contiguous copy first, and gather writes straight into the result.
#pragma once

#include <vector>

#include "core/pieces.h"

namespace mgpu {

// How a whole tensor lies in memory, seen from the dimension along which it is cut.
struct Layout {
  void* pointer;
  int64_t outer;         // runs: product of the sizes outside the dimension (slower in memory)
  int64_t rows;          // size of the dimension
  int64_t inner_nbytes;  // bytes of one row in one run: what is faster in memory, times the item size
};

// Rank r's part: `rows` of them, dense in a layout of its own with the same outer and inner_nbytes.
struct Part {
  void* pointer;
  int64_t rows;
};

// Copies between one stream's memory and the ranks.  Order is that of Collectives: a call comes after all that is on
// the streams, and what is put on them afterwards finds the copies made and may write what was read.  Where one end is
// host memory and the other a device's, or two devices do not reach each other, the bytes go by way of staging memory,
// in pieces: a host tensor that is scattered may be freed when the call returns, and one that is gathered is complete
// then.
class Transfer {
 public:
  // `ops` works on the ranks' memory, `host` on the host's; they are the same for ranks that live there.
  // `piece_nbytes` limits the staging memory of one piece of a call.
  Transfer(DeviceOps& ops, DeviceOps& host, Reach reach, int64_t piece_nbytes = kPieceNbytes / 4)
      : ops_(ops), host_(host), reach_(std::move(reach)), piece_nbytes_(piece_nbytes) {}

  void scatter(const Layout& whole, Stream from, const std::vector<Part>& parts, const Streams& on);
  void gather(const std::vector<Part>& parts, const Streams& on, const Layout& whole, Stream to);

 private:
  struct Staged;
  bool in_reach(Stream one, Stream other) const;
  void take(Staged& staged, Stream to);
  DeviceOps& ops_of(Stream on) { return on.on_host() ? host_ : ops_; }

  DeviceOps& ops_;
  DeviceOps& host_;
  Reach reach_;
  const int64_t piece_nbytes_;
};

}  // namespace mgpu
