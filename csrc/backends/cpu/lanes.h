// How elements of each dtype lie in a vector register, and how they come from memory and go back.  GNU vector
// extensions, no intrinsics: the same source serves every x86 level (see target_clones in reduce.cpp) and ARM.
// f16 and bf16 are widened to f32 on load and rounded once, to nearest even, on store.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#define MGPU_INLINE inline __attribute__((always_inline))

namespace mgpu::cpu {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

using F32x8 = float __attribute__((vector_size(32)));
using U32x8 = uint32_t __attribute__((vector_size(32)));
using U16x8 = uint16_t __attribute__((vector_size(16)));

// A cast between vectors of one width keeps the bits.
MGPU_INLINE U32x8 bits_of(F32x8 value) { return (U32x8)value; }
MGPU_INLINE F32x8 float_of(U32x8 bits) { return (F32x8)bits; }

MGPU_INLINE F32x8 widen(U16x8 packed, F16) {
  const U32x8 half = __builtin_convertvector(packed, U32x8);
  const U32x8 magnitude = half & 0x7fff;
  const U32x8 shifted = magnitude << 13;      // the 10 mantissa bits at the top of 23
  const U32x8 base = shifted + (113u << 23);  // a subnormal: 2^-14 (1 + m / 1024) ...
  const U32x8 subnormal = bits_of(float_of(base) - float_of(U32x8{} + (113u << 23)));  // ... less 2^-14, exactly
  const U32x8 normal = shifted + (112u << 23);                                         // exponent bias 15 -> 127
  const U32x8 special = shifted + (224u << 23);  // exponent 31 -> 255: infinity and NaN
  const U32x8 value = magnitude < 0x400 ? subnormal : (magnitude >= 0x7c00 ? special : normal);
  return float_of(value | ((half & 0x8000) << 16));
}

MGPU_INLINE U16x8 narrow(F32x8 wide, F16) {
  const U32x8 bits = bits_of(wide);
  const U32x8 magnitude = bits & 0x7fffffff;
  const U32x8 half_ulp_24 = U32x8{} + (126u << 23);  // 0.5f: its last bit is worth 2^-24
  const U32x8 subnormal = bits_of(float_of(magnitude) + float_of(half_ulp_24)) - half_ulp_24;  // the add rounds
  const U32x8 normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  U32x8 half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? U32x8{} + 0x7c00 : half;  // 65520 and more round to infinity
  half = magnitude > 0x7f800000 ? U32x8{} + 0x7e00 : half;   // NaN stays NaN
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000), U16x8);
}

MGPU_INLINE F32x8 widen(U16x8 packed, BF16) { return float_of(__builtin_convertvector(packed, U32x8) << 16); }

MGPU_INLINE U16x8 narrow(F32x8 wide, BF16) {
  const U32x8 bits = bits_of(wide);
  const U32x8 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32x8 nan = (bits >> 16) | 0x40;  // quiet it, whatever the lower bits were
  return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded, U16x8);
}

// Lanes<T>: `Vector` is what arithmetic is done on, `count` how many elements of T one holds.
template <class T>
struct Lanes {
  using Scalar = T;
  // A whole cache line: one register with AVX-512, two or four without.  (`using` drops a dependent type's attribute.)
  typedef T Vector __attribute__((vector_size(64)));
  static constexpr int count = 64 / sizeof(T);
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
  using Vector = F32x8;
  static constexpr int count = 8;
  static MGPU_INLINE Vector load(const Half* from) {
    U16x8 packed;
    std::memcpy(&packed, from, sizeof packed);
    return widen(packed, Half{});
  }
  static MGPU_INLINE void store(Half* to, Vector value) {
    const U16x8 packed = narrow(value, Half{});
    std::memcpy(to, &packed, sizeof packed);
  }
};
template <>
struct Lanes<F16> : HalfLanes<F16> {};
template <>
struct Lanes<BF16> : HalfLanes<BF16> {};

// Eight floats, stored as what `to` points at.
MGPU_INLINE void store_floats(float* to, F32x8 value) { std::memcpy(to, &value, sizeof value); }
template <class Half>
MGPU_INLINE void store_floats(Half* to, F32x8 value) {
  Lanes<Half>::store(to, value);
}

}  // namespace mgpu::cpu
