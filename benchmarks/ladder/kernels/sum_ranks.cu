// The launchers of sum_ranks' rungs, one C function each, for ctypes: 0, or the code of the launch that failed.
#include "sum_ranks.cuh"

#include "launch.cuh"

struct SumRanks {
  const void* const* host_in;    // a pointer per rank, for the rungs that launch per rank
  const void* const* device_in;  // the same table where the fused rung can read it
  int ranks;
  int half;  // dtype: 1 float16, 0 float32
  float* scratch;
  void* out;
  i64 count;
};

namespace {

// One rung of the first three: all ranks but the last into the running sum, the last one into the result.
template <class T, class BlocksOf>
int rank_by_rank(const SumRanks& call, void* stream, void (*add)(const float*, const T*, float*, i64),
                 void (*finish)(const float*, const T*, T*, i64), BlocksOf blocks) {
  const float* sum = nullptr;
  for (int rank = 0; rank < call.ranks - 1; ++rank) {
    const T* in = static_cast<const T*>(call.host_in[rank]);
    if (int code = start(add, blocks(call.count), stream, sum, in, call.scratch, call.count)) return code;
    sum = call.scratch;
  }
  const T* last = static_cast<const T*>(call.host_in[call.ranks - 1]);
  return start(finish, blocks(call.count), stream, sum, last, static_cast<T*>(call.out), call.count);
}

template <class T>
struct Rungs {
  static int naive(const SumRanks& call, void* stream) {
    const auto blocks = [](i64 count) { return blocks_of(count, kThreads * kStretch); };
    return rank_by_rank<T>(call, stream, sum_naive<T, float>, sum_naive<T, T>, blocks);
  }
  static int coalesced(const SumRanks& call, void* stream) {
    return rank_by_rank<T>(call, stream, sum_coalesced<T, float>, sum_coalesced<T, T>, few_blocks_of);
  }
  static int vectorised(const SumRanks& call, void* stream) {
    return rank_by_rank<T>(call, stream, sum_vectorised<T, float>, sum_vectorised<T, T>, few_blocks_of);
  }
  static int fused(const SumRanks& call, void* stream) {
    const auto in = reinterpret_cast<const T* const*>(call.device_in);
    return start(sum_fused<T>, blocks_of(call.count, kThreads * kWidthOf<T>), stream, in, call.ranks,
                 static_cast<T*>(call.out), call.count);
  }
};

template <class Do>
int with_dtype(const SumRanks& call, Do&& run) {
  return call.half ? run(Rungs<__half>()) : run(Rungs<float>());
}

}  // namespace

extern "C" {
int sum_ranks_naive(const SumRanks* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.naive(*call, stream); });
}
int sum_ranks_coalesced(const SumRanks* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.coalesced(*call, stream); });
}
int sum_ranks_vectorised(const SumRanks* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.vectorised(*call, stream); });
}
int sum_ranks_fused(const SumRanks* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.fused(*call, stream); });
}
}
