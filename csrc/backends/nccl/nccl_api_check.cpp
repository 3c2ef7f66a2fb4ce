// Compares nccl_api.h with the real header, where the compiler finds one (and CUDA's, which it includes).  Nothing here
// runs; a difference stops the build.
#include "backends/nccl/nccl_api.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

#include <type_traits>

namespace mgpu::nccl {
namespace {

// What travels in the same way: pointers, whatever they point to; enums and ints; structs of one size.
template <class Ours, class Theirs>
constexpr bool same_value() {
  if constexpr (std::is_pointer_v<Ours>)
    return std::is_pointer_v<Theirs>;
  else if constexpr (std::is_enum_v<Theirs>)
    return std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);
  else if constexpr (std::is_class_v<Ours>)
    return std::is_class_v<Theirs> && sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  else
    return std::is_same_v<Ours, Theirs>;
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class Returns, class... Arguments, class TheirReturns, class... TheirArguments>
struct SameCall<Returns (*)(Arguments...), TheirReturns (*)(TheirArguments...)> {
  static constexpr bool all() {
    if constexpr (sizeof...(Arguments) == sizeof...(TheirArguments))
      return same_value<Returns, TheirReturns>() && (same_value<Arguments, TheirArguments>() && ...);
    else
      return false;
  }
  static constexpr bool value = all();
};

#define MGPU_NCCL_COMPARE(returns, name, arguments) \
  static_assert(SameCall<decltype(Api::name), decltype(&nccl##name)>::value, "nccl" #name);
MGPU_NCCL_FUNCTIONS(MGPU_NCCL_COMPARE)
#undef MGPU_NCCL_COMPARE

static_assert(kSuccess == ncclSuccess && kUnhandledCudaError == ncclUnhandledCudaError &&
              kSystemError == ncclSystemError && kInternalError == ncclInternalError &&
              kInvalidArgument == ncclInvalidArgument && kInvalidUsage == ncclInvalidUsage &&
              kRemoteError == ncclRemoteError && kInProgress == ncclInProgress);
static_assert(kUint8 == ncclUint8 && kInt32 == ncclInt32 && kInt64 == ncclInt64 && kFloat16 == ncclFloat16 &&
              kFloat32 == ncclFloat32 && kFloat64 == ncclFloat64 && kBfloat16 == ncclBfloat16);
static_assert(kSum == ncclSum && kProd == ncclProd && kMax == ncclMax && kMin == ncclMin && kAvg == ncclAvg);

#define MGPU_NCCL_FIELD_AT(ours, theirs) static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs), #ours)
MGPU_NCCL_FIELD_AT(nbytes, size);
MGPU_NCCL_FIELD_AT(magic, magic);
MGPU_NCCL_FIELD_AT(version, version);
MGPU_NCCL_FIELD_AT(blocking, blocking);
MGPU_NCCL_FIELD_AT(cga_cluster_size, cgaClusterSize);
MGPU_NCCL_FIELD_AT(min_ctas, minCTAs);
MGPU_NCCL_FIELD_AT(max_ctas, maxCTAs);
MGPU_NCCL_FIELD_AT(net_name, netName);
MGPU_NCCL_FIELD_AT(split_share, splitShare);
#undef MGPU_NCCL_FIELD_AT
static_assert(sizeof(Config) <= sizeof(ncclConfig_t) && kUndefined == NCCL_CONFIG_UNDEF_INT);

}  // namespace
}  // namespace mgpu::nccl
#endif
