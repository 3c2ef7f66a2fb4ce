// Compiled once per instruction set (kernels.h): what is done element by element, and the sum of squares.
#include "backends/cpu/kernels.h"
#include "backends/cpu/lanes.h"

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
  switch (call.out_dtype) {
    case DType::f16:
      return cast<In, F16>(call, begin, end);
    case DType::bf16:
      return cast<In, BF16>(call, begin, end);
    case DType::f64:
      return cast<In, double>(call, begin, end);
    default:
      return cast<In, float>(call, begin, end);
  }
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
  switch (call.in_dtype) {
    case DType::f16:
      return cast_from<F16>(call, begin, end);
    case DType::bf16:
      return cast_from<BF16>(call, begin, end);
    case DType::f64:
      return cast_from<double>(call, begin, end);
    default:
      return cast_from<float>(call, begin, end);
  }
}

double sum_of_squares(const void* in, DType dtype, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::f16:
      return squares(static_cast<const F16*>(in), begin, end);
    case DType::bf16:
      return squares(static_cast<const BF16*>(in), begin, end);
    case DType::f64:
      return squares(static_cast<const double*>(in), begin, end);
    default:
      return squares(static_cast<const float*>(in), begin, end);
  }
}

}  // namespace mgpu::cpu::MGPU_LEVEL
