// The launchers of gather_rows' rungs, one C function each, for ctypes: 0, or the code of the launch that failed.
#include "gather_rows.cuh"

#include "launch.cuh"

struct GatherRows {
  const u8* rows;
  i64 row_count;  // elements of a row
  const i64* index;
  i64 batch;
  u8* picked;  // scratch: the batch as bytes
  void* out;
  int half;  // dtype of the result: 1 float16, 0 float32
  float scale, shift;
};

namespace {

using Pick = void (*)(const u8*, i64, const i64*, i64, u8*);
template <class Out>
using Normalise = void (*)(const u8*, i64, i64, Out*, float, float);

// One rung of the first three.
template <class Out>
int pick_then_normalise(const GatherRows& call, void* stream, Pick pick, i64 pick_blocks, Normalise<Out> normalise,
                        i64 normalise_blocks) {
  if (int code = start(pick, pick_blocks, stream, call.rows, call.row_count, call.index, call.batch, call.picked))
    return code;
  return start(normalise, normalise_blocks, stream, call.picked, call.row_count, call.batch,
               static_cast<Out*>(call.out), call.scale, call.shift);
}

template <class Out>
struct Rungs {
  static int naive(const GatherRows& call, void* stream) {
    const i64 blocks = blocks_of(call.batch, kThreads);
    return pick_then_normalise(call, stream, pick_naive, blocks, normalise_naive<Out>, blocks);
  }
  static int coalesced(const GatherRows& call, void* stream) {
    return pick_then_normalise(call, stream, pick_coalesced, few_rows(call), normalise_coalesced<Out>,
                               few_blocks_of(call.batch * call.row_count));
  }
  static int vectorised(const GatherRows& call, void* stream) {
    return pick_then_normalise(call, stream, pick_vectorised, few_rows(call), normalise_vectorised<Out>,
                               few_blocks_of(call.batch * call.row_count));
  }
  static int fused(const GatherRows& call, void* stream) {
    return start(gather_fused<Out>, blocks_of(call.batch, kInFlight), stream, call.rows, call.row_count, call.index,
                 call.batch, static_cast<Out*>(call.out), call.scale, call.shift);
  }
  static i64 few_rows(const GatherRows& call) { return call.batch < kMostBlocks ? call.batch : kMostBlocks; }
};

template <class Do>
int with_dtype(const GatherRows& call, Do&& run) {
  return call.half ? run(Rungs<__half>()) : run(Rungs<float>());
}

}  // namespace

extern "C" {
int gather_rows_naive(const GatherRows* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.naive(*call, stream); });
}
int gather_rows_coalesced(const GatherRows* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.coalesced(*call, stream); });
}
int gather_rows_vectorised(const GatherRows* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.vectorised(*call, stream); });
}
int gather_rows_fused(const GatherRows* call, void* stream) {
  return with_dtype(*call, [&](auto rungs) { return rungs.fused(*call, stream); });
}
}
