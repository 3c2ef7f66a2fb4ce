"""The CUDA C++ of `cupy_kernels.py`: three programs, and the macros that make one of each dtype.

They move 16 bytes an access: a head of single elements up to the first aligned address, whole vectors, and a tail.  The
compiler unrolls the short loops over a vector, so that it stays in registers.
"""

from __future__ import annotations

import torch

__all__ = ["OPS", "SOURCES", "TILE", "compiler_options"]

TILE = 4096  # elements that a block does
_NAMES = {torch.float32: "float", torch.float64: "double"}
OPS = {
    "sum": "a + b",
    "avg": "a + b",
    "prod": "a * b",
    "min": "a < b || a != a ? a : b",  # a NaN wins: it is the only number that is not itself
    "max": "a > b || a != a ? a : b",
}

# IN and OUT are the dtypes, WIDE the one that is computed in.
_COMMON = """
typedef long long i64;
enum { kWidth = 16 / (sizeof(IN) < sizeof(OUT) ? sizeof(IN) : sizeof(OUT)) };

template <class T, int kCount> struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vector {
  T at[kCount];
};
template <int kCount, class T> __device__ Vector<T, kCount> load(const T* from) {
  return *(const Vector<T, kCount>*)from;
}
template <int kCount, class T> __device__ void store(T* to, const Vector<T, kCount>& value) {
  *(Vector<T, kCount>*)to = value;
}

// Elements before the first index where both addresses are aligned to 16 bytes; -1: there is none.
__device__ int common_head(const IN* one, const OUT* other) {
  for (int head = 0; head < kWidth; ++head)
    if ((i64)(one + head) % 16 == 0 && (i64)(other + head) % 16 == 0) return head;
  return -1;
}

// Runs vector(i) for whole vectors of [begin, end), and single(i) for the elements before and after them.
template <class OnVector, class OnSingle>
__device__ void for_range(i64 begin, i64 end, int head, OnVector vector, OnSingle single) {
  const i64 first = head < 0 || begin + head > end ? end : begin + head;
  const i64 after = first + (end - first) / kWidth * kWidth;
  for (i64 i = begin + threadIdx.x; i < first; i += blockDim.x) single(i);
  for (i64 i = first + threadIdx.x * kWidth; i < after; i += blockDim.x * kWidth) vector(i);
  for (i64 i = after + threadIdx.x; i < end; i += blockDim.x) single(i);
}
"""

_PACK = """
template <int kCount> __device__ void move(const IN* from, OUT* to, WIDE scale) {
  const Vector<IN, kCount> in = load<kCount>(from);
  Vector<OUT, kCount> out;
  for (int k = 0; k < kCount; ++k) out.at[k] = (OUT)((WIDE)in.at[k] * scale);
  store<kCount>(to, out);
}

// A row of `pieces`: pointer, begin in flat, count, first tile.  A binary search says whose tile this block's is.
extern "C" __global__ void pack(const i64* pieces, int piece_count, OUT* flat, WIDE scale) {
  int low = 0, high = piece_count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (pieces[4 * middle + 3] <= blockIdx.x) low = middle; else high = middle - 1;
  }
  const i64* piece = pieces + 4 * low;
  const i64 begin = (blockIdx.x - piece[3]) * TILE, end = begin + TILE < piece[2] ? begin + TILE : piece[2];
  const IN* from = (const IN*)piece[0];
  OUT* to = flat + piece[1];
  for_range(begin, end, common_head(from + begin, to + begin),
            [&](i64 i) { move<kWidth>(from + i, to + i, scale); }, [&](i64 i) { move<1>(from + i, to + i, scale); });
}
"""

_SUM_RANKS = """
__device__ IN combine(IN a, IN b) { return COMBINE; }

template <int kCount> __device__ void sum_at(const IN* const* in, int ranks, OUT* out, i64 i, IN divisor) {
  Vector<IN, kCount> sums = load<kCount>(in[0] + i);
  for (int rank = 1; rank < ranks; ++rank) {
    const Vector<IN, kCount> next = load<kCount>(in[rank] + i);
    for (int k = 0; k < kCount; ++k) sums.at[k] = combine(sums.at[k], next.at[k]);
  }
  for (int k = 0; k < kCount; ++k) sums.at[k] /= divisor;
  store<kCount>(out + i, sums);
}

// Every input is read once, in the order of the ranks.  `together`: all arrays are as far from a multiple of 16 bytes.
extern "C" __global__ void sum_ranks(const IN* const* in, int ranks, OUT* out, i64 count, IN divisor, bool together) {
  const i64 begin = (i64)blockIdx.x * TILE, end = begin + TILE < count ? begin + TILE : count;
  for_range(begin, end, together ? common_head(out + begin, out + begin) : -1,
            [&](i64 i) { sum_at<kWidth>(in, ranks, out, i, divisor); },
            [&](i64 i) { sum_at<1>(in, ranks, out, i, divisor); });
}
"""

_SGD = """
enum { kBegin, kCount, kGroup, kStep, kActive, kSegmentColumns };
enum { kRate, kKeep, kFresh, kDecay, kFactor, kNesterov, kFirst, kTakesPart, kConstants };

// A thread per segment: raises its step, and works out once what all of its elements need.
extern "C" __global__ void prepare_sgd(i64* segments, i64 segment_count, const double* groups, const float* clip,
                                       const float* found_inf, double* constants) {
  const i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= segment_count) return;
  i64* segment = segments + index * kSegmentColumns;
  double* row = constants + index * kConstants;
  row[kTakesPart] = segment[kActive] != 0 && !(found_inf && *found_inf != 0);
  if (row[kTakesPart] == 0) return;
  const double* group = groups + segment[kGroup] * 6;  // lr, momentum, dampening, weight_decay, nesterov, maximize
  row[kRate] = group[0], row[kKeep] = group[1], row[kFresh] = 1 - group[2], row[kDecay] = group[3];
  row[kFactor] = (group[5] != 0 ? -1.0 : 1.0) * (clip ? *clip : 1.0);
  row[kNesterov] = group[4], row[kFirst] = ++segment[kStep] == 1;
}

template <int kTogether> __device__ void update(IN* parameters, const IN* gradients, IN* momenta, const IN* of) {
  Vector<IN, kTogether> p = load<kTogether>(parameters), g = load<kTogether>(gradients), m = {};
  if (of[kKeep] != 0) m = load<kTogether>(momenta);
  for (int k = 0; k < kTogether; ++k) {
    IN gradient = g.at[k] * of[kFactor] + of[kDecay] * p.at[k];
    if (of[kKeep] != 0) {
      m.at[k] = of[kFirst] != 0 ? gradient : of[kKeep] * m.at[k] + of[kFresh] * gradient;
      gradient = of[kNesterov] != 0 ? gradient + of[kKeep] * m.at[k] : m.at[k];
    }
    p.at[k] -= of[kRate] * gradient;
  }
  if (of[kKeep] != 0) store<kTogether>(momenta, m);
  store<kTogether>(parameters, p);
}

// A block does one tile of the flat buffers, segment by segment.
extern "C" __global__ void sgd(IN* parameters, const IN* gradients, IN* momenta, i64 count, const i64* segments,
                               i64 segment_count, const double* constants, bool together) {
  __shared__ IN of[kConstants];
  const i64 tile = (i64)blockIdx.x * TILE, tile_end = tile + TILE < count ? tile + TILE : count;
  i64 low = 0, high = segment_count;  // the first segment that ends after the tile's begin
  while (low < high) {
    const i64 middle = (low + high) / 2, *segment = segments + middle * kSegmentColumns;
    if (segment[kBegin] + segment[kCount] <= tile) low = middle + 1; else high = middle;
  }
  for (i64 index = low; index < segment_count && segments[index * kSegmentColumns] < tile_end; ++index) {
    const i64* segment = segments + index * kSegmentColumns;
    const i64 stop = segment[kBegin] + segment[kCount];
    const i64 begin = segment[kBegin] > tile ? segment[kBegin] : tile, end = stop < tile_end ? stop : tile_end;
    __syncthreads();  // the numbers of the segment before are no longer read
    if (threadIdx.x < kConstants) of[threadIdx.x] = (IN)constants[index * kConstants + threadIdx.x];
    __syncthreads();
    if (of[kTakesPart] == 0) continue;
    for_range(begin, end, together ? common_head(parameters + begin, gradients + begin) : -1,
              [&](i64 i) { update<kWidth>(parameters + i, gradients + i, momenta + i, of); },
              [&](i64 i) { update<1>(parameters + i, gradients + i, momenta + i, of); });
  }
}
"""

SOURCES = {"pack": _COMMON + _PACK, "sum_ranks": _COMMON + _SUM_RANKS, "sgd": _COMMON + _SGD}


def compiler_options(dtype: torch.dtype, target: torch.dtype | None = None, op: str = "sum") -> tuple[str, ...]:
    """Return the definitions for a source: dtypes, and for ``sum_ranks`` the operation; no fused multiply-add."""
    target = target or dtype
    for each in (dtype, target):
        if each not in _NAMES:
            raise TypeError(f"the cupy kernels work on float32 and float64, not on {each}")
    wide = _NAMES[torch.float64 if torch.float64 in (dtype, target) else torch.float32]
    macros = {"IN": _NAMES[dtype], "OUT": _NAMES[target], "WIDE": wide, "COMBINE": OPS[op], "TILE": TILE}
    return "-std=c++17", "--fmad=false", *(f"-D{name}={value}" for name, value in macros.items())
