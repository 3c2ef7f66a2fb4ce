// Our own declarations of NCCL's interface, so that the backend is built without nccl.h and runs with any library from
// 2.18 on. nccl_api_check.cpp compares every line with the real header where there is one.
#pragma once

#include <climits>
#include <cstddef>

#include "core/types.h"

namespace mgpu::nccl {

// NCCL's enums are ints here: a library that is newer than this file may answer with a number that is not in the list.
using Result = int;
constexpr Result kSuccess = 0, kUnhandledCudaError = 1, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4,
                 kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;
constexpr Result kTimeout = 8;  // has a name since 2.30; here also for a limit of ours

struct UniqueId {
  char internal[128];
};

// NCCL's own; we only hand it on.
struct Opaque;
using Handle = Opaque*;

// The configuration as 2.18 had it.  NCCL reads `nbytes` of it, and by `version` knows which fields it may believe.
constexpr int kUndefined = INT_MIN;
struct Config {
  size_t nbytes = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = 1;  // launcher.h has the reason
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;  // what was padding then is a field since 2.25
};

// Every function we use: the name without `nccl`, and the arguments.  All but the two texts return a Result.
#define MGPU_NCCL_FUNCTIONS(FUNCTION)                                                                   \
  FUNCTION(Result, GetVersion, (int* version))                                                          \
  FUNCTION(const char*, GetErrorString, (Result result))                                                \
  FUNCTION(const char*, GetLastError, (Handle communicator))                                            \
  FUNCTION(Result, GetUniqueId, (UniqueId * id))                                                        \
  FUNCTION(Result, GroupStart, ())                                                                      \
  FUNCTION(Result, GroupEnd, ())                                                                        \
  FUNCTION(Result, CommInitRankConfig, (Handle*, int ranks, UniqueId, int rank, Config*))               \
  FUNCTION(Result, CommFinalize, (Handle))                                                              \
  FUNCTION(Result, CommDestroy, (Handle))                                                               \
  FUNCTION(Result, CommAbort, (Handle))                                                                 \
  FUNCTION(Result, CommGetAsyncError, (Handle, Result*))                                                \
  FUNCTION(Result, AllReduce, (const void*, void*, size_t count, int dtype, int op, Handle, void*))     \
  FUNCTION(Result, Broadcast, (const void*, void*, size_t count, int dtype, int root, Handle, void*))   \
  FUNCTION(Result, Reduce, (const void*, void*, size_t, int dtype, int op, int root, Handle, void*))    \
  FUNCTION(Result, AllGather, (const void*, void*, size_t count, int dtype, Handle, void*))             \
  FUNCTION(Result, ReduceScatter, (const void*, void*, size_t count, int dtype, int op, Handle, void*)) \
  FUNCTION(Result, Send, (const void*, size_t count, int dtype, int peer, Handle, void* stream))        \
  FUNCTION(Result, Recv, (void*, size_t count, int dtype, int peer, Handle, void* stream))

// One table, filled at once.
struct Api {
#define MGPU_NCCL_FIELD(returns, name, arguments) returns(*name) arguments = nullptr;
  MGPU_NCCL_FUNCTIONS(MGPU_NCCL_FIELD)
#undef MGPU_NCCL_FIELD
};

// ncclDataType_t and ncclRedOp_t.
constexpr int kUint8 = 1, kInt32 = 2, kInt64 = 4, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9;
constexpr int kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4;

constexpr int kUnknown = -1;  // NCCL answers it with an invalid argument

inline int number_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return kFloat16;
    case DType::bf16:
      return kBfloat16;
    case DType::f32:
      return kFloat32;
    case DType::f64:
      return kFloat64;
    case DType::i32:
      return kInt32;
    case DType::i64:
      return kInt64;
    case DType::u8:
      return kUint8;
  }
  return kUnknown;
}
inline int number_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return kSum;
    case ReduceOp::avg:
      return kAvg;
    case ReduceOp::prod:
      return kProd;
    case ReduceOp::min:
      return kMin;
    case ReduceOp::max:
      return kMax;
  }
  return kUnknown;
}

// Whether a call was taken.  In progress: it goes on in the background, and CommGetAsyncError says when it has ended.
inline bool accepted(Result result) { return result == kSuccess || result == kInProgress; }

}  // namespace mgpu::nccl
