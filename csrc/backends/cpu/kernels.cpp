#include "backends/cpu/kernels.h"

namespace mgpu::cpu {

#define MGPU_DECLARE_LEVEL(level)                                  \
  namespace level {                                                \
  void reduce(const Reduction&);                                   \
  void gather_rows(const GatherRows&, int64_t begin, int64_t end); \
  }

MGPU_DECLARE_LEVEL(baseline)
MGPU_DECLARE_LEVEL(avx2)
MGPU_DECLARE_LEVEL(avx512)

#undef MGPU_DECLARE_LEVEL

static std::vector<Kernels> find_kernels() {
  std::vector<Kernels> found;
  found.reserve(3);
  found.push_back({"baseline", baseline::reduce, baseline::gather_rows});
#ifdef MGPU_X86_LEVELS  // with the instructions that CMakeLists.txt lets the compiler use
  const bool narrower = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (narrower) found.push_back({"avx2", avx2::reduce, avx2::gather_rows});
  if (narrower && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", avx512::reduce, avx512::gather_rows});
#endif
  return found;
}

const std::vector<Kernels>& usable_kernels() {
  static const std::vector<Kernels> found = find_kernels();
  return found;
}

}  // namespace mgpu::cpu
