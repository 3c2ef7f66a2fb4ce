// Compiled once per instruction set (kernels.h): one step of each optimizer over a range of a segment.  The formulas
// are torch.optim's, in the same order of operations; half precision is computed in float32.
#include <cmath>

#include "backends/cpu/kernels.h"
#include "backends/cpu/lanes.h"

namespace mgpu::cpu::MGPU_LEVEL {
namespace {

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int kBlock = 16;

// What a gradient is multiplied by before anything else: clipped, unscaled, and turned round for a maximum.
inline double factor_of(const FlatParameters& flat, bool maximize) {
  const double clip = flat.clip ? *flat.clip : 1.0, scale = flat.loss_scale ? *flat.loss_scale : 1.0;
  return (maximize ? -1.0 : 1.0) * clip / scale;
}

inline const double* group_of(const FlatParameters& flat, const int64_t* segment, int columns) {
  return flat.groups + segment[kGroup] * columns;
}

template <class T>
MGPU_INLINE void sgd_range(const Sgd& call, const SegmentRange& range) {
  using W = Wide<T>;
  const double* group = group_of(call.flat, range.segment, kSgdColumns);
  const W lr = static_cast<W>(group[kSgdLr]), momentum = static_cast<W>(group[kMomentum]);
  const W fresh = static_cast<W>(1 - group[kDampening]), decay = static_cast<W>(group[kSgdWeightDecay]);
  const W factor = static_cast<W>(factor_of(call.flat, group[kSgdMaximize] != 0));
  const bool nesterov = group[kNesterov] != 0, first = range.segment[kStep] == 1;
  const int64_t start = range.segment[kBegin];
  T* parameters = static_cast<T*>(call.flat.parameters) + start;
  const T* gradients = static_cast<const T*>(call.flat.gradients) + start;
  T* buffers = momentum != 0 ? static_cast<T*>(call.momentum) + start : nullptr;
  for (int64_t i = range.begin; i < range.end; i += kBlock) {
    const int64_t left = range.end - i;
    W p[kBlock], g[kBlock], m[kBlock];
    load_block<kBlock>(parameters + i, left, p);
    load_block<kBlock>(gradients + i, left, g);
    for (int k = 0; k < kBlock; ++k) g[k] = g[k] * factor + decay * p[k];
    if (buffers) {
      load_block<kBlock>(buffers + i, left, m);
      for (int k = 0; k < kBlock; ++k) m[k] = first ? g[k] : momentum * m[k] + fresh * g[k];
      store_block<kBlock>(buffers + i, left, m);
      for (int k = 0; k < kBlock; ++k) g[k] = nesterov ? g[k] + momentum * m[k] : m[k];
    }
    for (int k = 0; k < kBlock; ++k) p[k] -= lr * g[k];
    store_block<kBlock>(parameters + i, left, p);
  }
}

template <class T>
MGPU_INLINE void adam_range(const Adam& call, const SegmentRange& range) {
  using W = Wide<T>;
  const double* group = group_of(call.flat, range.segment, kAdamColumns);
  const double step = static_cast<double>(range.segment[kStep]);
  const double correction1 = 1 - std::pow(group[kBeta1], step), correction2 = 1 - std::pow(group[kBeta2], step);
  const W fresh1 = static_cast<W>(1 - group[kBeta1]), beta2 = static_cast<W>(group[kBeta2]);
  const W fresh2 = static_cast<W>(1 - group[kBeta2]), eps = static_cast<W>(group[kEps]);
  const W step_size = static_cast<W>(group[kAdamLr] / correction1), root2 = static_cast<W>(std::sqrt(correction2));
  const W shrink = static_cast<W>(call.decoupled ? 1 - group[kAdamLr] * group[kAdamWeightDecay] : 1);
  const W decay = static_cast<W>(call.decoupled ? 0 : group[kAdamWeightDecay]);
  const W factor = static_cast<W>(factor_of(call.flat, group[kAdamMaximize] != 0));
  const int64_t start = range.segment[kBegin];
  T* parameters = static_cast<T*>(call.flat.parameters) + start;
  const T* gradients = static_cast<const T*>(call.flat.gradients) + start;
  T* averages = static_cast<T*>(call.exp_avg) + start;
  T* squares = static_cast<T*>(call.exp_avg_sq) + start;
  T* largest = call.max_exp_avg_sq ? static_cast<T*>(call.max_exp_avg_sq) + start : nullptr;
  for (int64_t i = range.begin; i < range.end; i += kBlock) {
    const int64_t left = range.end - i;
    W p[kBlock], g[kBlock], m[kBlock], v[kBlock], most[kBlock];
    load_block<kBlock>(parameters + i, left, p);
    load_block<kBlock>(gradients + i, left, g);
    load_block<kBlock>(averages + i, left, m);
    load_block<kBlock>(squares + i, left, v);
    for (int k = 0; k < kBlock; ++k) {
      p[k] *= shrink;
      g[k] = g[k] * factor + decay * p[k];
      m[k] += fresh1 * (g[k] - m[k]);
      v[k] = v[k] * beta2 + fresh2 * g[k] * g[k];
      most[k] = v[k];
    }
    store_block<kBlock>(averages + i, left, m);
    store_block<kBlock>(squares + i, left, v);
    if (largest) {
      W before[kBlock];
      load_block<kBlock>(largest + i, left, before);
      for (int k = 0; k < kBlock; ++k) most[k] = before[k] > v[k] ? before[k] : v[k];
      store_block<kBlock>(largest + i, left, most);
    }
    for (int k = 0; k < kBlock; ++k) p[k] -= step_size * (m[k] / (std::sqrt(most[k]) / root2 + eps));
    store_block<kBlock>(parameters + i, left, p);
  }
}

}  // namespace

void sgd(const Sgd& call, const SegmentRange& range) {
  switch (call.flat.dtype) {
    case DType::f16:
      return sgd_range<F16>(call, range);
    case DType::bf16:
      return sgd_range<BF16>(call, range);
    case DType::f64:
      return sgd_range<double>(call, range);
    default:
      return sgd_range<float>(call, range);
  }
}

void adam(const Adam& call, const SegmentRange& range) {
  switch (call.flat.dtype) {
    case DType::f16:
      return adam_range<F16>(call, range);
    case DType::bf16:
      return adam_range<BF16>(call, range);
    case DType::f64:
      return adam_range<double>(call, range);
    default:
      return adam_range<float>(call, range);
  }
}

}  // namespace mgpu::cpu::MGPU_LEVEL
