// One step of an optimizer over flat buffers, in two kernels.  The first, a thread per segment, raises the steps and
// turns each segment's hyper-parameters into the few numbers that the arithmetic needs; the second, a block per tile of
// the buffers, reads them.  Everything comes from device memory: nothing is asked of the host.  The formulas are
// torch.optim's, in the same order of operations; half precision is computed in float.
#pragma once

#include "backends/cuda/kernels/elements.cuh"
#include "core/kernel_calls.h"

namespace mgpu::cuda {

// What a segment's arithmetic needs; the row of `constants` in this order.  Active 0: leave it alone.
enum SgdConstant { kSgdActive, kSgdRate, kSgdKeep, kSgdFresh, kSgdDecay, kSgdFactor, kSgdNesterov, kSgdFirst };
enum AdamConstant {
  kAdamActive,
  kStepSize,
  kRoot2,
  kFresh1,
  kKeep2,
  kFresh2,
  kAdamEps,
  kAdamDecay,
  kAdamFactor,
  kShrink,
  kAdamConstants
};
enum LionConstant { kLionActive, kLionRate, kLionFresh1, kLionKeep2, kLionFresh2, kLionShrink, kLionFactor };
static_assert(kAdamConstants <= kOptimizerConstants, "a row has room for them");

// Raises the step of a segment that takes part, and returns it; 0: the segment does not take part, or its group does
// not exist, which a kernel cannot report in another way.
__device__ __forceinline__ int64_t next_step(const FlatBuffer& flat, int64_t* segment) {
  const bool overflow = flat.found_inf != nullptr && *flat.found_inf != 0;
  const bool known = segment[kGroup] >= 0 && segment[kGroup] < flat.group_count;
  return overflow || !known || segment[kActive] == 0 ? 0 : ++segment[kStep];
}

// The factor of a gradient, which comes before anything else: the clip, and -1 for a maximum.
__device__ __forceinline__ double factor_of(const FlatBuffer& flat, bool maximize) {
  return (maximize ? -1.0 : 1.0) * (flat.clip ? *flat.clip : 1.0);
}

// What a thread of the first kernel works on: the segment's row of constants, and its hyper-parameters, of `columns`
// numbers.  Step 0: there is nothing to do.
struct Prepared {
  int64_t step;
  double* row;
  const double* group;
};
static_assert(kSgdActive == 0 && kAdamActive == 0 && kLionActive == 0,
              "the first constant says whether the segment takes part");
__device__ __forceinline__ Prepared prepare(const FlatBuffer& flat, int columns) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= flat.segment_count) return {0, nullptr, nullptr};
  int64_t* segment = flat.segments + index * kSegmentColumns;
  double* row = flat.constants + index * kOptimizerConstants;
  const int64_t step = next_step(flat, segment);
  for (int k = 1; k < kOptimizerConstants; ++k) row[k] = 0;  // the second kernel reads whole rows
  row[0] = step != 0;
  return {step, row, flat.groups + segment[kGroup] * columns};
}

__global__ void __launch_bounds__(kThreads) prepare_sgd_kernel(const __grid_constant__ Sgd call) {
  const auto [step, row, group] = prepare(call.flat, kSgdColumns);
  if (step == 0) return;
  row[kSgdRate] = group[kSgdLr];
  row[kSgdKeep] = group[kMomentum];
  row[kSgdFresh] = 1 - group[kDampening];
  row[kSgdDecay] = group[kSgdWeightDecay];
  row[kSgdFactor] = factor_of(call.flat, group[kSgdMaximize] != 0);
  row[kSgdNesterov] = group[kNesterov];
  row[kSgdFirst] = step == 1;
}

__global__ void __launch_bounds__(kThreads) prepare_adam_kernel(const __grid_constant__ Adam call) {
  const auto [step, row, group] = prepare(call.flat, kAdamColumns);
  if (step == 0) return;
  const double steps = static_cast<double>(step), decay = group[kAdamLr] * group[kAdamWeightDecay];
  row[kStepSize] = group[kAdamLr] / (1 - pow(group[kBeta1], steps));
  row[kRoot2] = sqrt(1 - pow(group[kBeta2], steps));
  row[kFresh1] = 1 - group[kBeta1];
  row[kKeep2] = group[kBeta2];
  row[kFresh2] = 1 - group[kBeta2];
  row[kAdamEps] = group[kEps];
  row[kAdamDecay] = call.decoupled ? 0 : group[kAdamWeightDecay];
  row[kAdamFactor] = factor_of(call.flat, group[kAdamMaximize] != 0);
  row[kShrink] = call.decoupled ? 1 - decay : 1;
}

__global__ void __launch_bounds__(kThreads) prepare_lion_kernel(const __grid_constant__ Lion call) {
  const auto [step, row, group] = prepare(call.flat, kLionColumns);
  if (step == 0) return;
  row[kLionRate] = group[kLionLr];
  row[kLionFresh1] = 1 - group[kLionBeta1];
  row[kLionKeep2] = group[kLionBeta2];
  row[kLionFresh2] = 1 - group[kLionBeta2];
  row[kLionShrink] = 1 - group[kLionLr] * group[kLionWeightDecay];
  row[kLionFactor] = factor_of(call.flat, group[kLionMaximize] != 0);
}

// The gradients of a segment: element i of the flat buffers has its own at at[i], wherever they lie.
template <class T>
struct Gradients {
  const T* at;
  bool aligned;  // as the flat buffers are, so that vectors of these are vectors of those
};
template <int kWidth, class T>
__device__ __forceinline__ Vector<T, kWidth> load(const Gradients<T>& gradients, int64_t i) {
  if constexpr (kWidth == 1) {
    return load<1>(gradients.at + i);
  } else {
    if (gradients.aligned) return load<kWidth>(gradients.at + i);
    Vector<T, kWidth> in;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) in.at[k] = gradients.at[i + k];
    return in;
  }
}

// What a thread reads of each buffer before it computes, and then the arithmetic: apart, so that the loads of the next
// elements are on their way meanwhile.
template <class T, int kWidth>
struct SgdVectors {
  Vector<T, kWidth> parameter, gradient, momentum;
};
// Returns null where the segment keeps no momentum.
template <class T>
__device__ __forceinline__ T* momenta_of(const Sgd& call, const Widened<T>* constants) {
  return constants[kSgdKeep] != 0 ? static_cast<T*>(call.momentum) : nullptr;
}
template <int kWidth, class T>
__device__ __forceinline__ SgdVectors<T, kWidth> read(const Sgd& call, const Widened<T>* constants,
                                                      const Gradients<T>& gradients, int64_t i) {
  const T* momenta = momenta_of<T>(call, constants);
  SgdVectors<T, kWidth> in;
  in.parameter = load<kWidth>(static_cast<const T*>(call.flat.parameters) + i);
  in.gradient = load<kWidth>(gradients, i);
  in.momentum = momenta ? load<kWidth>(momenta + i) : Vector<T, kWidth>{};
  return in;
}
template <int kWidth, class T>
__device__ __forceinline__ void update(const Sgd& call, const Widened<T>* constants, int64_t i,
                                       SgdVectors<T, kWidth> in) {
  using Wide = Widened<T>;
  T* momenta = momenta_of<T>(call, constants);
  const bool first = constants[kSgdFirst] != 0, nesterov = constants[kSgdNesterov] != 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const Wide p = widen<Wide>(in.parameter.at[k]);
    Wide g = widen<Wide>(in.gradient.at[k]) * constants[kSgdFactor] + constants[kSgdDecay] * p;
    if (momenta) {
      const Wide kept = widen<Wide>(in.momentum.at[k]);
      const Wide m = first ? g : constants[kSgdKeep] * kept + constants[kSgdFresh] * g;
      in.momentum.at[k] = narrow<T>(m);
      g = nesterov ? g + constants[kSgdKeep] * m : m;
    }
    in.parameter.at[k] = narrow<T>(p - constants[kSgdRate] * g);
  }
  if (momenta) store<kWidth>(momenta + i, in.momentum);
  store<kWidth>(static_cast<T*>(call.flat.parameters) + i, in.parameter);
}

// A kernel with the running maximum of AMSGrad, or one without it, which has registers left for other loads.
template <bool kMaximum>
struct AdamOf : Adam {};
template <class T, int kWidth>
struct AdamVectors {
  Vector<T, kWidth> parameter, gradient, average, square, most;
};
template <int kWidth, class T, bool kMaximum>
__device__ __forceinline__ AdamVectors<T, kWidth> read(const AdamOf<kMaximum>& call, const Widened<T>*,
                                                       const Gradients<T>& gradients, int64_t i) {
  AdamVectors<T, kWidth> in;
  in.parameter = load<kWidth>(static_cast<const T*>(call.flat.parameters) + i);
  in.average = load<kWidth>(static_cast<const T*>(call.exp_avg) + i);
  in.square = load<kWidth>(static_cast<const T*>(call.exp_avg_sq) + i);
  in.gradient = load<kWidth>(gradients, i);
  if constexpr (kMaximum) in.most = load<kWidth>(static_cast<const T*>(call.max_exp_avg_sq) + i);
  return in;
}
template <bool kMaximum, int kWidth, class T>
__device__ __forceinline__ void compute(const Widened<T>* constants, AdamVectors<T, kWidth>& in) {
  using Wide = Widened<T>;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const Wide p = widen<Wide>(in.parameter.at[k]) * constants[kShrink];
    const Wide g = widen<Wide>(in.gradient.at[k]) * constants[kAdamFactor] + constants[kAdamDecay] * p;
    const Wide before = widen<Wide>(in.average.at[k]);
    const Wide m = before + constants[kFresh1] * (g - before);
    Wide v = widen<Wide>(in.square.at[k]) * constants[kKeep2] + constants[kFresh2] * g * g;
    in.average.at[k] = narrow<T>(m);
    in.square.at[k] = narrow<T>(v);
    if constexpr (kMaximum) {
      const Wide so_far = widen<Wide>(in.most.at[k]);
      v = so_far > v ? so_far : v;
      in.most.at[k] = narrow<T>(v);
    }
    in.parameter.at[k] =
        narrow<T>(p - constants[kStepSize] * (m / (sqrt(v) / constants[kRoot2] + constants[kAdamEps])));
  }
}
template <int kWidth, class T, bool kMaximum>
__device__ __forceinline__ void update(const AdamOf<kMaximum>& call, const Widened<T>* constants, int64_t i,
                                       AdamVectors<T, kWidth> in) {
  compute<kMaximum, kWidth, T>(constants, in);
  store<kWidth>(static_cast<T*>(call.exp_avg) + i, in.average);
  store<kWidth>(static_cast<T*>(call.exp_avg_sq) + i, in.square);
  if constexpr (kMaximum) store<kWidth>(static_cast<T*>(call.max_exp_avg_sq) + i, in.most);
  store<kWidth>(static_cast<T*>(call.flat.parameters) + i, in.parameter);
}

template <class T, int kWidth>
struct LionVectors {
  Vector<T, kWidth> parameter, gradient, average;
};
template <int kWidth, class T>
__device__ __forceinline__ LionVectors<T, kWidth> read(const Lion& call, const Widened<T>*,
                                                       const Gradients<T>& gradients, int64_t i) {
  return {load<kWidth>(static_cast<const T*>(call.flat.parameters) + i), load<kWidth>(gradients, i),
          load<kWidth>(static_cast<const T*>(call.exp_avg) + i)};
}
template <int kWidth, class T>
__device__ __forceinline__ void update(const Lion& call, const Widened<T>* constants, int64_t i,
                                       LionVectors<T, kWidth> in) {
  using Wide = Widened<T>;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const Wide g = widen<Wide>(in.gradient.at[k]) * constants[kLionFactor], m = widen<Wide>(in.average.at[k]);
    const Wide way = m + constants[kLionFresh1] * (g - m), rate = constants[kLionRate];
    const Wide move = way > 0 ? rate : way < 0 ? -rate : Wide{0};
    in.parameter.at[k] = narrow<T>(widen<Wide>(in.parameter.at[k]) * constants[kLionShrink] - move);
    in.average.at[k] = narrow<T>(m * constants[kLionKeep2] + constants[kLionFresh2] * g);
  }
  store<kWidth>(static_cast<T*>(call.exp_avg) + i, in.average);
  store<kWidth>(static_cast<T*>(call.flat.parameters) + i, in.parameter);
}

// One segment's constants after another, in shared memory.  While the block works on a segment, its first threads hold
// the constants of the next one, so that loading them costs no time:
//
//   work on segment s with row s % 2      next row on its way to registers
//   store it into row (s + 1) % 2         its readers, of segment s - 1, have passed the last barrier
//   barrier                               all threads see the row
template <class T>
class SegmentConstants {
 public:
  using Rows = Widened<T>[2][kOptimizerConstants];
  __device__ __forceinline__ SegmentConstants(const FlatBuffer& flat, Rows& rows) : flat_(flat), rows_(rows) {}
  __device__ __forceinline__ void load(int64_t index) {
    if (threadIdx.x < kOptimizerConstants && index < flat_.segment_count)
      next_ = static_cast<Widened<T>>(flat_.constants[index * kOptimizerConstants + threadIdx.x]);
  }
  __device__ __forceinline__ void store(int64_t index) {
    if (threadIdx.x < kOptimizerConstants && index < flat_.segment_count) rows_[index & 1][threadIdx.x] = next_;
    __syncthreads();
  }
  __device__ __forceinline__ const Widened<T>* of(int64_t index) const { return rows_[index & 1]; }

 private:
  const FlatBuffer& flat_;
  Rows& rows_;
  Widened<T> next_;
};

// How a kernel goes over its elements.
struct Walk {
  int base;           // the address of element 0 of every buffer, modulo 16 bytes; -1: they differ: no vectors
  int64_t per_block;  // elements of a block
};

// Runs `load` and `finish` over the vectors of a stretch, a thread's next one loaded before the one at hand is
// computed.
template <class Load, class Finish>
__device__ __forceinline__ void for_vectors(int64_t first, int vectors, int width, Load&& load, Finish&& finish) {
  int v = threadIdx.x;
  decltype(load(int64_t{})) next;
  if (v < vectors) next = load(first + v * width);
#pragma unroll 1
  for (; v < vectors; v += kThreads) {
    const auto mine = next;
    if (v + kThreads < vectors) next = load(first + (v + kThreads) * width);
    finish(first + v * width, mine);
  }
}

// Updates the elements [begin, end) of a segment.
template <class T, class Call>
__device__ __forceinline__ void for_elements(const Call& call, const Widened<T>* constants,
                                             const Gradients<T>& gradients, int64_t begin, int64_t end, int base) {
  constexpr int kWidth = vector_width(sizeof(T), sizeof(T));
  const auto single = [&](int64_t i) { update<1, T>(call, constants, i, read<1>(call, constants, gradients, i)); };
  const uint64_t address = base + begin * static_cast<int64_t>(sizeof(T));
  const int head = base < 0 ? -1 : common_head(address, sizeof(T), address, sizeof(T));
  const Extent extent = extent_of(end - begin, head, kWidth);
  if (extent.width == 1) {
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) single(i);
    return;
  }
  for_vectors(
      begin + extent.head, static_cast<int>(extent.vectors), kWidth,
      [&](int64_t i) { return read<kWidth>(call, constants, gradients, i); },
      [&](int64_t i, const auto& in) { update<kWidth, T>(call, constants, i, in); });
  if (threadIdx.x < extent.head) single(begin + threadIdx.x);
  if (threadIdx.x < extent.tail) single(end - extent.tail + threadIdx.x);
}

// `base` as in Walk.
template <class T>
__device__ __forceinline__ Gradients<T> gradients_of(const FlatBuffer& flat, int64_t index, int base) {
  if (!flat.gradient_of) return {static_cast<const T*>(flat.gradients), true};
  const T* at = static_cast<const T*>(flat.gradient_of[index]) - flat.segments[index * kSegmentColumns + kBegin];
  return {at, static_cast<int>(reinterpret_cast<uint64_t>(at) % kAlignment) == base};
}

// Runs `visit(constants, gradients, begin, end)` over the block's elements, segment by segment.
template <class T, class Visit>
__device__ __forceinline__ void for_segments(const FlatBuffer& flat, const Walk& walk, Visit&& visit) {
  __shared__ typename SegmentConstants<T>::Rows rows;
  const int64_t block_begin = int64_t{blockIdx.x} * walk.per_block;
  const int64_t block_end = block_begin + walk.per_block < flat.count ? block_begin + walk.per_block : flat.count;
  int64_t index = segment_at(flat.segments, flat.segment_count, kSegmentColumns, block_begin);
  SegmentConstants<T> constants(flat, rows);
  constants.load(index);
  constants.store(index);
  for (; index < flat.segment_count; ++index) {
    const int64_t* segment = flat.segments + index * kSegmentColumns;
    const int64_t segment_begin = segment[kBegin], segment_end = segment_begin + segment[kCount];
    if (segment_begin >= block_end) return;
    constants.load(index + 1);
    const Widened<T>* mine = constants.of(index);
    const int64_t begin = segment_begin > block_begin ? segment_begin : block_begin;
    const int64_t end = segment_end < block_end ? segment_end : block_end;
    if (mine[0] != 0) visit(mine, gradients_of<T>(flat, index, walk.base), begin, end);
    constants.store(index + 1);
  }
}

template <class T, class Call>
__device__ __forceinline__ void for_block(const Call& call, const Walk& walk) {
  for_segments<T>(call.flat, walk,
                  [&](const auto* constants, const Gradients<T>& gradients, int64_t begin, int64_t end) {
                    for_elements<T>(call, constants, gradients, begin, end, walk.base);
                  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) sgd_kernel(const __grid_constant__ Sgd call, Walk walk) {
  for_block<T>(call, walk);
}

template <class T>
__global__ void __launch_bounds__(kThreads) lion_kernel(const __grid_constant__ Lion call, Walk walk) {
  for_block<T>(call, walk);
}

// Blocks that a multiprocessor holds at once: as many as there are registers for without spilling.
template <class T, bool kMaximum>
constexpr int kAdamBlocks = sizeof(T) == 4 && !kMaximum ? 3 : 2;

template <class T, bool kMaximum>
__global__ void __launch_bounds__(kThreads, kAdamBlocks<T, kMaximum>)
    adam_kernel(const __grid_constant__ AdamOf<kMaximum> call, Walk walk) {
  for_block<T>(call, walk);
}

}  // namespace mgpu::cuda
