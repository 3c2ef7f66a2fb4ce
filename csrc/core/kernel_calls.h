// What each kernel is asked to do.  Pointers are of the memory of the stream's device; counts are elements.  "Computed
// in": float64 where a float64 takes part, else float32; half precision is widened on load and rounded once on store.
#pragma once

#include <cstdint>
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
  int64_t rows_count;  // rows that there are
  int64_t row_count;   // elements of a row
  const int64_t* index;
  int64_t index_count;
  float scale;
  float shift;
  void* out;
  DType out_dtype;  // f16, bf16 or f32
};

// out[k][i] = in[0][i] op in[1][i] op ... for every k: each input is read once and each output written once.
struct SumRanks {
  std::vector<const void*> in;  // combined in this order
  std::vector<void*> out;       // one may be one of the inputs, exactly
  int64_t count;
  DType dtype;
  ReduceOp op;
  int divisor;  // avg divides by it after the sum; 1 leaves the sum (a partial one)
};

// One rank's part of an all-reduce by push: it writes its values and then a flag into the memory of every rank, waits
// for everybody's flags, and adds up what was written, in rank order.  So the parts of all ranks must run at the same
// time.
struct PushSum {
  std::vector<const void*> in;  // of all ranks
  std::vector<void*> out;       // of all ranks; each may be the rank's input, exactly
  std::vector<void*> memory;    // of all ranks: push_memory_nbytes(ranks) bytes each, 0 before the first call
  size_t rank;
  int64_t count;  // up to kPushNbytes
  DType dtype;
  ReduceOp op;
  int divisor;        // as of SumRanks
  uint64_t sequence;  // 1, 2, 3 ... of the calls with this memory
  int64_t limit_ns;   // of the wait; then floating outputs are NaN and integers are not summed, also of later calls
  uint64_t* late;     // memory of the host: after the limit, one more than the rank that did not come; where the host
                      // writes there, waits end at once
};
// Slots for the values of each rank: two, in turn, because a rank that is ahead may write its next values while another
// still reads.  Values begin in a slot where they begin at their rank, modulo 16 bytes.  Then the flags of each rank,
// one for each block of a launch, and a word that is not 0 once a wait was given up.
constexpr int64_t kPushNbytes = 256 * 1024;
constexpr int64_t kPushSlotNbytes = kPushNbytes + 16;
constexpr int kPushBlocks = 16;
constexpr int64_t push_memory_nbytes(int64_t ranks) {
  return ranks * (2 * kPushSlotNbytes + kPushBlocks * static_cast<int64_t>(sizeof(uint64_t))) + 16;
}

// One tensor among many: elements [begin, begin + count) of the flat buffer.
struct Piece {
  void* pointer;
  int64_t begin;
  int64_t count;
};
// flat[begin + i] = tensor[i] * scale (pack) or tensor[i] = flat[begin + i] * scale (unpack), for every piece.
// With one dtype and scale 1 the bytes are moved as they are; otherwise both dtypes are floating.
struct Packing {
  std::vector<Piece> pieces;
  DType dtype;  // of the tensors
  void* flat;
  DType flat_dtype;
  double scale;
};

// out[i] = in[i] * scale; floating dtypes.  `out` may be `in` where the dtypes are the same.
struct ScaleCast {
  const void* in;
  DType in_dtype;
  void* out;
  DType out_dtype;
  int64_t count;
  double scale;
};

// out = sqrt(sum of the squares of all elements): tile by tile into `partials`, then these in their order, so the bits
// depend on the counts alone.  Added up in float64; within a tile a GPU may use about 44 bits.
struct L2Norm {
  std::vector<Piece> pieces;  // `begin` is not used
  DType dtype;                // floating
  double* partials;           // norm_tiles(pieces) of them, at least one; behind them one that is 0 and stays 0
  void* out;
  DType out_dtype;  // f32 or f64
};
constexpr int64_t kNormTile = 8 * 1024;
int64_t norm_tiles(const std::vector<Piece>& pieces);

// The parameters of many tensors, their gradients and the optimizer's state, each in one flat buffer of one dtype.
// The gradient of each segment may lie in memory of its own instead, unpacked.
// What a step needs to know lies in the same memory, so that a step can be captured in a graph and its numbers changed
// between replays.
struct FlatBuffer {
  void* parameters;
  const void* gradients;
  int64_t count;      // of each flat buffer
  DType dtype;        // floating
  int64_t* segments;  // (segment_count, 5): begin, count, group, step, active; in the order of begin, not overlapping
  int64_t segment_count;
  double* constants;       // (segment_count, kOptimizerConstants): room for a device to work in; the host needs none
  const double* groups;    // (group_count, 6): each optimizer has an enum of the columns
  int64_t group_count;     // a segment of another group is left alone
  const double* clip;      // gradients are multiplied by it; null: 1
  const float* found_inf;  // not 0: nothing is changed, not even the steps; null: 0
  const void* const* gradient_of = nullptr;  // one per segment that is active; null: they lie in `gradients`
};
constexpr int kOptimizerConstants = 10;
// The columns of `segments`.  `step` counts the updates of the segment and is raised by the kernel; a segment that is
// not active (a parameter without gradient) is left alone whole.
enum SegmentColumn { kBegin, kCount, kGroup, kStep, kActive, kSegmentColumns };

// torch.optim.SGD.  Groups: lr, momentum, dampening, weight_decay, nesterov, maximize.
struct Sgd {
  FlatBuffer flat;
  void* momentum;  // the buffers; null: no group has momentum
};
enum SgdColumn { kSgdLr, kMomentum, kDampening, kSgdWeightDecay, kNesterov, kSgdMaximize, kSgdColumns };

// torch.optim.Adam, and AdamW where `decoupled`.  Groups: lr, beta1, beta2, eps, weight_decay, maximize.
struct Adam {
  FlatBuffer flat;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null: not amsgrad
  bool decoupled;        // weight decay shrinks the parameters instead of joining the gradient
};
enum AdamColumn { kAdamLr, kBeta1, kBeta2, kEps, kAdamWeightDecay, kAdamMaximize, kAdamColumns };

// Lion (Chen et al. 2023, arXiv 2302.06675).  Groups: lr, beta1, beta2, weight_decay, maximize, and one unused column.
struct Lion {
  FlatBuffer flat;
  void* exp_avg;
};
enum LionColumn { kLionLr, kLionBeta1, kLionBeta2, kLionWeightDecay, kLionMaximize, kLionUnused, kLionColumns };

}  // namespace mgpu
