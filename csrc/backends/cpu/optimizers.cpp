// Compiled once per instruction set (kernels.h): one step of each optimizer over a range of a segment.  The formulas
// are torch.optim's, in the same order of operations; half precision is computed in float32.
#include <cmath>

#include "backends/cpu/kernels.h"
#include "backends/cpu/lanes.h"
#include "core/dispatch.h"

namespace mgpu::cpu::MGPU_LEVEL {
namespace {

// The factor of a gradient, which comes before anything else: the clip, and -1 for a maximum.
inline double factor_of(const FlatBuffer& flat, bool maximize) {
  return (maximize ? -1.0 : 1.0) * (flat.clip ? *flat.clip : 1.0);
}

inline const double* group_of(const FlatBuffer& flat, const int64_t* segment, int columns) {
  return flat.groups + segment[kGroup] * columns;
}

template <class V>
MGPU_INLINE V square_root(V value) {
  for (size_t k = 0; k < sizeof value / sizeof value[0]; ++k) value[k] = std::sqrt(value[k]);
  return value;
}

// Calls update(values, gradient) for register after register of a segment: `values` holds a vector of the parameters
// and one of each state, as the flat buffers in `changed` do, and what it holds then is written back.  In registers,
// not in arrays: of an array the compiler loads some pieces of a vector apart, and the processor waits to join them.
template <class T, int kStreams, class Update>
MGPU_INLINE void update_range(const FlatBuffer& flat, void* const (&changed)[kStreams], const SegmentRange& range,
                              Update update) {
  using L = Lanes<T>;
  const int64_t start = range.segment[kBegin];
  const T* gradients = flat.gradient_of
                           ? static_cast<const T*>(flat.gradient_of[(range.segment - flat.segments) / kSegmentColumns])
                           : static_cast<const T*>(flat.gradients) + start;
  T* streams[kStreams];
  for (int s = 0; s < kStreams; ++s) streams[s] = static_cast<T*>(changed[s]) + start;
  typename L::Vector values[kStreams];
  const auto step = [&](int64_t i) {
    for (int s = 0; s < kStreams; ++s) values[s] = L::load(streams[s] + i);
    update(values, L::load(gradients + i));
    for (int s = 0; s < kStreams; ++s) L::store(streams[s] + i, values[s]);
  };
  constexpr int64_t kLine = 64 / sizeof(T);  // one or more registers
  constexpr int64_t kCacheNbytes = 2 * 1024 * 1024;
  const bool is_cached = flat.count * static_cast<int64_t>(sizeof(T)) * (kStreams + 1) <= kCacheNbytes;
  int64_t i = range.begin;
  for (; i + kLine <= range.end; i += kLine) {
    prefetch_ahead(gradients + i);
    for (int s = 0; s < kStreams; ++s) is_cached ? prefetch_to_write(streams[s] + i) : prefetch_ahead(streams[s] + i);
    for (int64_t part = 0; part < kLine; part += L::count) step(i + part);
  }
  for (; i + L::count <= range.end; i += L::count) step(i);
  if (i == range.end) return;
  // The rest goes through the same arithmetic, in a padded vector.
  const size_t nbytes = (range.end - i) * sizeof(T);
  T pad[L::count] = {};
  for (int s = 0; s < kStreams; ++s) {
    std::memcpy(pad, streams[s] + i, nbytes);
    values[s] = L::load(pad);
  }
  std::memcpy(pad, gradients + i, nbytes);
  update(values, L::load(pad));
  for (int s = 0; s < kStreams; ++s) {
    L::store(pad, values[s]);
    std::memcpy(streams[s] + i, pad, nbytes);
  }
}

template <class T>
MGPU_INLINE void sgd_range(const Sgd& call, const SegmentRange& range) {
  using W = typename Lanes<T>::Scalar;
  using V = typename Lanes<T>::Vector;
  const double* group = group_of(call.flat, range.segment, kSgdColumns);
  const W lr = static_cast<W>(group[kSgdLr]), momentum = static_cast<W>(group[kMomentum]);
  const W fresh = static_cast<W>(1 - group[kDampening]), decay = static_cast<W>(group[kSgdWeightDecay]);
  const W factor = static_cast<W>(factor_of(call.flat, group[kSgdMaximize] != 0));
  const bool nesterov = group[kNesterov] != 0, first = range.segment[kStep] == 1;
  if (momentum == 0)
    return update_range<T>(call.flat, {call.flat.parameters}, range, [=](V* values, V gradient) {
      V& p = values[0];
      p -= lr * (gradient * factor + decay * p);
    });
  update_range<T>(call.flat, {call.flat.parameters, call.momentum}, range, [=](V* values, V gradient) {
    V &p = values[0], &m = values[1];
    const V g = gradient * factor + decay * p;
    m = first ? g : momentum * m + fresh * g;
    p -= lr * (nesterov ? g + momentum * m : m);
  });
}

template <class T>
MGPU_INLINE void adam_range(const Adam& call, const SegmentRange& range) {
  using W = typename Lanes<T>::Scalar;
  using V = typename Lanes<T>::Vector;
  const double* group = group_of(call.flat, range.segment, kAdamColumns);
  const double step = static_cast<double>(range.segment[kStep]);
  const double correction1 = 1 - std::pow(group[kBeta1], step), correction2 = 1 - std::pow(group[kBeta2], step);
  const W fresh1 = static_cast<W>(1 - group[kBeta1]), beta2 = static_cast<W>(group[kBeta2]);
  const W fresh2 = static_cast<W>(1 - group[kBeta2]), eps = static_cast<W>(group[kEps]);
  const W step_size = static_cast<W>(group[kAdamLr] / correction1), root2 = static_cast<W>(std::sqrt(correction2));
  const W shrink = static_cast<W>(call.decoupled ? 1 - group[kAdamLr] * group[kAdamWeightDecay] : 1);
  const W decay = static_cast<W>(call.decoupled ? 0 : group[kAdamWeightDecay]);
  const W factor = static_cast<W>(factor_of(call.flat, group[kAdamMaximize] != 0));
  const auto moments = [=](V* values, V gradient) {
    V &p = values[0], &m = values[1], &v = values[2];
    p *= shrink;
    const V g = gradient * factor + decay * p;
    m += fresh1 * (g - m);
    v = v * beta2 + fresh2 * g * g;
  };
  const auto move = [=](V& p, V m, V v) { p -= step_size * (m / (square_root(v) / root2 + eps)); };
  if (!call.max_exp_avg_sq)
    return update_range<T>(call.flat, {call.flat.parameters, call.exp_avg, call.exp_avg_sq}, range,
                           [=](V* values, V gradient) {
                             moments(values, gradient);
                             move(values[0], values[1], values[2]);
                           });
  update_range<T>(call.flat, {call.flat.parameters, call.exp_avg, call.exp_avg_sq, call.max_exp_avg_sq}, range,
                  [=](V* values, V gradient) {
                    moments(values, gradient);
                    values[3] = values[3] > values[2] ? values[3] : values[2];
                    move(values[0], values[1], values[3]);
                  });
}

template <class T>
MGPU_INLINE void lion_range(const Lion& call, const SegmentRange& range) {
  using W = typename Lanes<T>::Scalar;
  using V = typename Lanes<T>::Vector;
  const double* group = group_of(call.flat, range.segment, kLionColumns);
  const W fresh1 = static_cast<W>(1 - group[kLionBeta1]), beta2 = static_cast<W>(group[kLionBeta2]);
  const W fresh2 = static_cast<W>(1 - group[kLionBeta2]);
  const W shrink = static_cast<W>(1 - group[kLionLr] * group[kLionWeightDecay]);
  const W factor = static_cast<W>(factor_of(call.flat, group[kLionMaximize] != 0));
  const V none = {}, up = none + static_cast<W>(group[kLionLr]), down = -up;
  update_range<T>(call.flat, {call.flat.parameters, call.exp_avg}, range, [=](V* values, V gradient) {
    V &p = values[0], &m = values[1];
    const V g = gradient * factor, way = m + fresh1 * (g - m);
    p = p * shrink - (way > none ? up : (way < none ? down : none));
    m = m * beta2 + fresh2 * g;
  });
}

}  // namespace

void sgd(const Sgd& call, const SegmentRange& range) {
  dispatch_floating<Elements>(call.flat.dtype, "sgd", [&](auto one) { sgd_range<decltype(one)>(call, range); });
}

void adam(const Adam& call, const SegmentRange& range) {
  dispatch_floating<Elements>(call.flat.dtype, "adam", [&](auto one) { adam_range<decltype(one)>(call, range); });
}

void lion(const Lion& call, const SegmentRange& range) {
  dispatch_floating<Elements>(call.flat.dtype, "lion", [&](auto one) { lion_range<decltype(one)>(call, range); });
}

}  // namespace mgpu::cpu::MGPU_LEVEL
