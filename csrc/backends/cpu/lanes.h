// How elements of each dtype lie in a vector register, and how they come from memory and go back.  GNU vector
// extensions: the same source serves every x86 level (see kernels.h) and ARM; the one instruction they lack is called
// by name, the conversion of f16, and gives the same bits.  f16 and bf16 are widened to f32 on load and rounded once,
// to nearest even, on store.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#define MGPU_INLINE inline __attribute__((always_inline))

namespace mgpu::cpu::MGPU_LEVEL {

// One register, no wider: of a wider vector the compiler takes comparisons apart, element by element.
#if defined(__AVX512F__)
constexpr int kVectorNbytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorNbytes = 32;
#else
constexpr int kVectorNbytes = 16;
#endif

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
struct Elements {  // see core/dispatch.h
  using f16 = F16;
  using bf16 = BF16;
};

using F32s = float __attribute__((vector_size(kVectorNbytes)));
using U32s = uint32_t __attribute__((vector_size(kVectorNbytes)));
using U16s = uint16_t __attribute__((vector_size(kVectorNbytes / 2)));

// A cast between vectors of one width keeps the bits.
MGPU_INLINE U32s bits_of(F32s value) { return (U32s)value; }
MGPU_INLINE F32s float_of(U32s bits) { return (F32s)bits; }

#if defined(__AVX512F__)
// With a mask of ones: g++ 12 warns of the others, inside its own header.
MGPU_INLINE F32s widen(U16s packed, F16) { return (F32s)_mm512_maskz_cvtph_ps(0xffff, (__m256i)packed); }
MGPU_INLINE U16s narrow(F32s wide, F16) {
  return (U16s)_mm512_maskz_cvtps_ph(0xffff, (__m512)wide, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__F16C__)
MGPU_INLINE F32s widen(U16s packed, F16) { return (F32s)_mm256_cvtph_ps((__m128i)packed); }
MGPU_INLINE U16s narrow(F32s wide, F16) { return (U16s)_mm256_cvtps_ph((__m256)wide, _MM_FROUND_TO_NEAREST_INT); }
#else
MGPU_INLINE F32s widen(U16s packed, F16) {
  const U32s half = __builtin_convertvector(packed, U32s);
  const U32s magnitude = half & 0x7fff;
  const U32s shifted = magnitude << 13;      // the 10 mantissa bits at the top of 23
  const U32s base = shifted + (113u << 23);  // a subnormal: 2^-14 (1 + m / 1024) ...
  const U32s subnormal = bits_of(float_of(base) - float_of(U32s{} + (113u << 23)));  // ... less 2^-14, exactly
  const U32s normal = shifted + (112u << 23);                                        // exponent bias 15 -> 127
  const U32s special = shifted + (224u << 23);  // exponent 31 -> 255: infinity and NaN
  const U32s value = magnitude < 0x400 ? subnormal : (magnitude >= 0x7c00 ? special : normal);
  return float_of(value | ((half & 0x8000) << 16));
}

MGPU_INLINE U16s narrow(F32s wide, F16) {
  const U32s bits = bits_of(wide);
  const U32s magnitude = bits & 0x7fffffff;
  const U32s half_ulp_24 = U32s{} + (126u << 23);  // 0.5f: its last bit is worth 2^-24
  const U32s subnormal = bits_of(float_of(magnitude) + float_of(half_ulp_24)) - half_ulp_24;  // the add rounds
  const U32s normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  U32s half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? U32s{} + 0x7c00 : half;                    // 65520 and more round to infinity
  half = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : half;  // NaN stays NaN, and quiet
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000), U16s);
}
#endif

MGPU_INLINE F32s widen(U16s packed, BF16) { return float_of(__builtin_convertvector(packed, U32s) << 16); }

MGPU_INLINE U16s narrow(F32s wide, BF16) {
  const U32s bits = bits_of(wide);
  const U32s rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32s nan = (bits >> 16) | 0x40;  // quiet it, whatever the lower bits were
  return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded, U16s);
}

// Asks for the line 3 KiB behind this one, into the second cache, and for the one 512 bytes behind it, from there into
// the first: code that reads several streams in step waits for their pages most, and the first cache has too few
// entries for all lines that are on their way (both measured).  Past the end a prefetch does nothing.
MGPU_INLINE void prefetch_ahead(const void* from) {
  constexpr int kForReading = 0, kFirstCache = 3, kSecondCache = 2;
  __builtin_prefetch(static_cast<const char*>(from) + 3072, kForReading, kSecondCache);
  __builtin_prefetch(static_cast<const char*>(from) + 512, kForReading, kFirstCache);
}

// The same for memory that is written, too, and that lies in a cache: the core owns a line before it writes there,
// which other cores may have read meanwhile (weights that several threads have just multiplied by: 0.6 of the time,
// measured).
MGPU_INLINE void prefetch_to_write(const void* from) {
  constexpr int kForWriting = 1, kFirstCache = 3;
  __builtin_prefetch(static_cast<const char*>(from) + 3072, kForWriting, kFirstCache);
  __builtin_prefetch(static_cast<const char*>(from) + 512, kForWriting, kFirstCache);
}

// Lanes<T>: `Vector` is what arithmetic is done on, `count` how many elements of T one holds.
template <class T>
struct Lanes {
  using Scalar = T;
  typedef T Vector __attribute__((vector_size(kVectorNbytes)));  // `using` drops a dependent type's attribute
  static constexpr int count = kVectorNbytes / sizeof(T);
  static MGPU_INLINE Vector load(const T* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static MGPU_INLINE void store(T* to, Vector value) { std::memcpy(to, &value, sizeof value); }
};

template <class Half>
struct HalfLanes {
  using Scalar = float;
  using Vector = F32s;
  static constexpr int count = kVectorNbytes / 4;
  static MGPU_INLINE Vector load(const Half* from) {
    U16s packed;
    std::memcpy(&packed, from, sizeof packed);
    return widen(packed, Half{});
  }
  static MGPU_INLINE void store(Half* to, Vector value) {
    const U16s packed = narrow(value, Half{});
    std::memcpy(to, &packed, sizeof packed);
  }
};
template <>
struct Lanes<F16> : HalfLanes<F16> {};
template <>
struct Lanes<BF16> : HalfLanes<BF16> {};

// A vector of floats, stored as what `to` points at.
MGPU_INLINE void store_floats(float* to, F32s value) { std::memcpy(to, &value, sizeof value); }
template <class Half>
MGPU_INLINE void store_floats(Half* to, F32s value) {
  Lanes<Half>::store(to, value);
}

// Blocks of kBlock numbers as an array of Wide (float or double), for kernels that the compiler turns into vectors.  Of
// the last block only `left` are there: the others are read as 0 and not written.
template <int kBlock, class T, class Wide>
MGPU_INLINE void widen_block(const T* from, Wide* to) {
  if constexpr (std::is_floating_point_v<T>) {
    for (int k = 0; k < kBlock; ++k) to[k] = static_cast<Wide>(from[k]);
  } else {
    constexpr int kCount = Lanes<T>::count;
    static_assert(kBlock % kCount == 0, "a block is whole registers");
    for (int k = 0; k < kBlock; k += kCount) {
      const F32s values = Lanes<T>::load(from + k);
      for (int lane = 0; lane < kCount; ++lane) to[k + lane] = values[lane];
    }
  }
}
template <int kBlock, class T, class Wide>
MGPU_INLINE void narrow_block(T* to, const Wide* from) {
  if constexpr (std::is_floating_point_v<T>) {
    for (int k = 0; k < kBlock; ++k) to[k] = static_cast<T>(from[k]);
  } else {
    constexpr int kCount = Lanes<T>::count;
    for (int k = 0; k < kBlock; k += kCount) {
      F32s values;
      for (int lane = 0; lane < kCount; ++lane) values[lane] = static_cast<float>(from[k + lane]);
      Lanes<T>::store(to + k, values);
    }
  }
}
template <int kBlock, class T, class Wide>
MGPU_INLINE void load_block(const T* from, int64_t left, Wide* to) {
  if (left >= kBlock) return widen_block<kBlock>(from, to);
  T pad[kBlock] = {};
  std::memcpy(pad, from, left * sizeof(T));
  widen_block<kBlock>(pad, to);
}
template <int kBlock, class T, class Wide>
MGPU_INLINE void store_block(T* to, int64_t left, const Wide* from) {
  if (left >= kBlock) return narrow_block<kBlock>(to, from);
  T pad[kBlock];
  narrow_block<kBlock>(pad, from);
  std::memcpy(to, pad, left * sizeof(T));
}

}  // namespace mgpu::cpu::MGPU_LEVEL
