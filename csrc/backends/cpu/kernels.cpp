#include "backends/cpu/kernels.h"

namespace mgpu::cpu {

#define MGPU_DECLARE_LEVEL(level)                                                                      \
  namespace level {                                                                                    \
  void reduce(const Reduction&);                                                                       \
  void gather_rows(const GatherRows&, int64_t begin, int64_t end);                                     \
  void scale_cast(const ScaleCast&, int64_t begin, int64_t end);                                       \
  double sum_of_squares(const void*, DType, int64_t begin, int64_t end);                               \
  void sgd(const Sgd&, const SegmentRange&);                                                           \
  void adam(const Adam&, const SegmentRange&);                                                         \
  void lion(const Lion&, const SegmentRange&);                                                         \
  constexpr Kernels kernels{#level, reduce, gather_rows, scale_cast, sum_of_squares, sgd, adam, lion}; \
  }

MGPU_DECLARE_LEVEL(baseline)
#ifdef MGPU_X86_LEVELS
MGPU_DECLARE_LEVEL(avx2)
MGPU_DECLARE_LEVEL(avx512)
#endif

#undef MGPU_DECLARE_LEVEL

static std::vector<Kernels> find_kernels() {
  std::vector<Kernels> found{baseline::kernels};
#ifdef MGPU_X86_LEVELS  // with the instructions that CMakeLists.txt lets the compiler use
  const bool narrower = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (narrower) found.push_back(avx2::kernels);
  if (narrower && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back(avx512::kernels);
#endif
  return found;
}

const std::vector<Kernels>& usable_kernels() {
  static const auto* found = new std::vector<Kernels>(find_kernels());  // never destroyed: the pool's threads use it
  return *found;
}

}  // namespace mgpu::cpu
