// Compiled once per instruction set (kernels.h).
#include <algorithm>

#include "backends/cpu/kernels.h"
#include "backends/cpu/lanes.h"
#include "core/dispatch.h"

namespace mgpu::cpu::MGPU_LEVEL {
namespace {

using U8s = uint8_t __attribute__((vector_size(kVectorNbytes / 4)));
using I32s = int32_t __attribute__((vector_size(kVectorNbytes)));

// An instruction per step; one from bytes to floats is taken apart, byte by byte (g++ 12: five times as slow).
MGPU_INLINE F32s to_floats(U8s packed) {
  const U32s wide = __builtin_convertvector(__builtin_convertvector(packed, U16s), U32s);
  return __builtin_convertvector((I32s)wide, F32s);
}

// Rows of uint8 -> normalised floats.  A vector at a time: the same arithmetic as a store of a reduction.
template <class Out>
MGPU_INLINE void normalise(const uint8_t* from, int64_t count, float scale, float shift, Out* to) {
  constexpr int kCount = kVectorNbytes / 4;
  const auto convert = [&](U8s packed) { return to_floats(packed) * scale + shift; };
  int64_t i = 0;
  for (; i + kCount <= count; i += kCount) {
    U8s packed;
    std::memcpy(&packed, from + i, kCount);
    store_floats(to + i, convert(packed));
  }
  if (i == count) return;
  U8s packed = {};
  Out pad[kCount];
  std::memcpy(&packed, from + i, count - i);
  store_floats(pad, convert(packed));
  std::memcpy(to + i, pad, (count - i) * sizeof(Out));
}

// Rows lie anywhere, so no hardware guesses the next one: it is asked for while this one is converted.
MGPU_INLINE void prefetch_row(const GatherRows& c, int64_t i) {
  const uint8_t* row = c.rows + c.index[i] * c.row_count;
  for (int64_t line = 0; line < std::min<int64_t>(c.row_count, 2048); line += 64) __builtin_prefetch(row + line);
}

template <class Out>
MGPU_INLINE void gather_range(const GatherRows& c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + 2 < end) prefetch_row(c, i + 2);
    normalise(c.rows + c.index[i] * c.row_count, c.row_count, c.scale, c.shift,
              static_cast<Out*>(c.out) + i * c.row_count);
  }
}

}  // namespace

void gather_rows(const GatherRows& call, int64_t begin, int64_t end) {
  dispatch_floating<Elements>(call.out_dtype, "gather_rows", [&](auto out) {
    if constexpr (std::is_same_v<decltype(out), double>)
      refuse_dtype("gather_rows", call.out_dtype);
    else
      gather_range<decltype(out)>(call, begin, end);
  });
}

}  // namespace mgpu::cpu::MGPU_LEVEL
