// Door 1: what a room can do to memory that it owns.  The road is written against this door, so the same road runs on
// every room, and on the fakes of the tests.
#pragma once

#include <vector>

#include "core/types.h"

namespace mgpu {

// A rectangle of bytes: `rows` runs of `row_nbytes`, the starts `to_pitch` and `from_pitch` bytes apart.
// A plain copy has one row.
struct CopyBlock {
  void* to;
  const void* from;
  int64_t rows;
  int64_t row_nbytes;
  int64_t to_pitch;
  int64_t from_pitch;
};

// out[i] = rows[index[i]] * scale + shift, one row of `row_count` uint8 each.
struct GatherRows {
  const uint8_t* rows;
  int64_t rows_count;  // rows that there are; an index outside [0, rows_count) is the caller's mistake
  int64_t row_count;   // elements of a row
  const int64_t* index;
  int64_t index_count;
  float scale;
  float shift;
  void* out;
  DType out_dtype;  // f16, bf16 or f32
};

class DeviceOps {
 public:
  virtual ~DeviceOps() = default;
  // The blocks' destinations do not overlap each other nor any source.
  virtual void copy(const std::vector<CopyBlock>& blocks) = 0;
  virtual void gather_rows(const GatherRows& call) = 0;
};

}  // namespace mgpu
