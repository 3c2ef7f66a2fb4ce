// The launchers of pack's rungs, one C function each, for ctypes: 0, or the code of the launch that failed.
#include "pack.cuh"

#include "launch.cuh"

struct Pack {
  const Piece* host_pieces;    // for the rungs that launch per tensor
  const Piece* device_pieces;  // the same table where the fused rung can read it
  int piece_count;
  int in_half, out_half;  // dtypes: 1 float16, 0 float32
  void* scratch;          // `count` elements of the tensors' dtype
  void* flat;
  i64 count;
  i64 tiles;  // of the fused rung
  float scale;
};

namespace {

// One rung of the first three: how many blocks it wants for a count is all that the launcher must know.
template <class In, class Out, class BlocksOf>
int each_then_all(const Pack& call, void* stream, void (*copy)(const In*, In*, i64, float),
                  void (*cast)(const In*, Out*, i64, float), BlocksOf blocks) {
  In* scratch = static_cast<In*>(call.scratch);
  for (int p = 0; p < call.piece_count; ++p) {
    const Piece& piece = call.host_pieces[p];
    const In* from = static_cast<const In*>(piece.from);
    if (int code = start(copy, blocks(piece.count), stream, from, scratch + piece.begin, piece.count, 1.0f))
      return code;
  }
  return start(cast, blocks(call.count), stream, scratch, static_cast<Out*>(call.flat), call.count, call.scale);
}

template <class In, class Out>
struct Rungs {
  static int naive(const Pack& call, void* stream) {
    const auto blocks = [](i64 count) { return blocks_of(count, kThreads * kStretch); };
    return each_then_all<In, Out>(call, stream, pack_naive<In, In>, pack_naive<In, Out>, blocks);
  }
  static int coalesced(const Pack& call, void* stream) {
    return each_then_all<In, Out>(call, stream, pack_coalesced<In, In>, pack_coalesced<In, Out>, few_blocks_of);
  }
  static int vectorised(const Pack& call, void* stream) {
    return each_then_all<In, Out>(call, stream, pack_vectorised<In, In>, pack_vectorised<In, Out>, few_blocks_of);
  }
  static int fused(const Pack& call, void* stream) {
    return start(pack_fused<In, Out>, call.tiles, stream, call.device_pieces, call.piece_count,
                 static_cast<Out*>(call.flat), call.scale);
  }
};

template <class Do>
int with_dtypes(const Pack& call, Do&& run) {
  if (call.in_half) return call.out_half ? run(Rungs<__half, __half>()) : run(Rungs<__half, float>());
  return call.out_half ? run(Rungs<float, __half>()) : run(Rungs<float, float>());
}

}  // namespace

extern "C" {
int pack_naive(const Pack* call, void* stream) {
  return with_dtypes(*call, [&](auto rungs) { return rungs.naive(*call, stream); });
}
int pack_coalesced(const Pack* call, void* stream) {
  return with_dtypes(*call, [&](auto rungs) { return rungs.coalesced(*call, stream); });
}
int pack_vectorised(const Pack* call, void* stream) {
  return with_dtypes(*call, [&](auto rungs) { return rungs.vectorised(*call, stream); });
}
int pack_fused(const Pack* call, void* stream) {
  return with_dtypes(*call, [&](auto rungs) { return rungs.fused(*call, stream); });
}
i64 pack_tile(int in_half, int out_half) {
  return in_half || out_half ? kPackTile<__half, float> : kPackTile<float, float>;
}
}
