// Compiled once per instruction set (kernels.h): what is done element by element, and the sum of squares.
#include "backends/cpu/kernels.h"
#include "backends/cpu/lanes.h"
#include "core/dispatch.h"

namespace mgpu::cpu::MGPU_LEVEL {
namespace {

constexpr int kBlock = 16;

template <class In, class Out, class Wide>
MGPU_INLINE void cast_range(const ScaleCast& call, int64_t begin, int64_t end) {
  const In* in = static_cast<const In*>(call.in);
  Out* out = static_cast<Out*>(call.out);
  const Wide scale = static_cast<Wide>(call.scale);
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t left = end - i;
    Wide block[kBlock];
    load_block<kBlock>(in + i, left, block);
    for (Wide& value : block) value *= scale;
    store_block<kBlock>(out + i, left, block);
  }
}

template <class In, class Out>
MGPU_INLINE void cast(const ScaleCast& call, int64_t begin, int64_t end) {
  constexpr bool kDouble = std::is_same_v<In, double> || std::is_same_v<Out, double>;
  cast_range<In, Out, std::conditional_t<kDouble, double, float>>(call, begin, end);
}

template <class In>
void cast_from(const ScaleCast& call, int64_t begin, int64_t end) {
  dispatch_floating<Elements>(call.out_dtype, "scale_cast",
                              [&](auto out) { cast<In, decltype(out)>(call, begin, end); });
}

// In interleaved sums: enough to keep the adders busy, and the same order whatever the instruction set.
template <class T>
MGPU_INLINE double squares(const T* in, int64_t begin, int64_t end) {
  double sums[kBlock] = {};
  for (int64_t i = begin; i < end; i += kBlock) {
    for (size_t line = 0; line < kBlock * sizeof(T); line += 64)
      prefetch_ahead(reinterpret_cast<const char*>(in + i) + line);
    double block[kBlock];
    load_block<kBlock>(in + i, end - i, block);
    for (int k = 0; k < kBlock; ++k) sums[k] += block[k] * block[k];
  }
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace

void scale_cast(const ScaleCast& call, int64_t begin, int64_t end) {
  dispatch_floating<Elements>(call.in_dtype, "scale_cast", [&](auto in) { cast_from<decltype(in)>(call, begin, end); });
}

double sum_of_squares(const void* in, DType dtype, int64_t begin, int64_t end) {
  return dispatch_floating<Elements>(
      dtype, "l2_norm", [&](auto one) { return squares(static_cast<const decltype(one)*>(in), begin, end); });
}

}  // namespace mgpu::cpu::MGPU_LEVEL
