// Arithmetic, comparisons, bits and shifts.
#include <cmath>

#include "fakes/ptx/operations.h"

namespace ptx {
namespace {

template <class T>
using Wide = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                                std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
T wrapped_product(T a, T b) {
  return static_cast<T>(uint64_t{static_cast<Unsigned<T>>(a)} * static_cast<Unsigned<T>>(b));
}
template <class T>
Wide<T> wide_product(T a, T b) {
  return static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b);
}

// Counts have 32 bits; one of all bits or more shifts every bit out.
template <class T, bool kLeft>
void shift(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t *a = warp.from(instruction.from[0]), *b = warp.from(instruction.from[1]);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes, [&](int lane) {
    const T value = get<T>(a[lane]);
    const auto count = static_cast<uint32_t>(b[lane]);
    const T sign = std::is_signed_v<T> && value < T{0} ? static_cast<T>(-1) : T{0};
    if (count >= 8 * sizeof(T))
      to[lane] = put(static_cast<Unsigned<T>>(kLeft ? T{0} : sign));
    else
      to[lane] = put(static_cast<Unsigned<T>>(kLeft ? static_cast<T>(static_cast<Unsigned<T>>(value) << count)
                                                    : static_cast<T>(value >> count)));
  });
}

// The least number has no opposite: divided by -1 it wraps.
template <class T, bool kQuotient>
void divide(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t *a = warp.from(instruction.from[0]), *b = warp.from(instruction.from[1]);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes, [&](int lane) {
    const T x = get<T>(a[lane]), y = get<T>(b[lane]);
    if (y == T{0}) warp.run->fault("division by zero", instruction, &warp, lane);
    if (std::is_signed_v<T> && y == static_cast<T>(-1))
      to[lane] = kQuotient ? put(static_cast<Unsigned<T>>(Unsigned<T>{0} - static_cast<Unsigned<T>>(x))) : 0;
    else
      to[lane] = put(static_cast<Unsigned<T>>(kQuotient ? x / y : x % y));
  });
}

// Integers wrap, so they are added and multiplied as unsigned.
template <class T>
void add_integers(Operations& all, const std::string& type) {
  using U = Unsigned<T>;
  BINARY("add." + type, T, static_cast<T>(static_cast<U>(a) + static_cast<U>(b)));
  BINARY("sub." + type, T, static_cast<T>(static_cast<U>(a) - static_cast<U>(b)));
  BINARY("mul.lo." + type, T, wrapped_product(a, b));
  TERNARY("mad.lo." + type, T, static_cast<T>(static_cast<U>(wrapped_product(a, b)) + get<U>(c)));
  BINARY("mul.hi." + type, T, static_cast<T>((static_cast<__int128>(a) * static_cast<__int128>(b)) >> 8 * sizeof(T)));
  if constexpr (sizeof(T) <= 4) {
    BINARY("mul.wide." + type, T, wide_product(a, b));
    TERNARY("mad.wide." + type, T,
            static_cast<Wide<T>>(static_cast<Unsigned<Wide<T>>>(wide_product(a, b)) + get<Unsigned<Wide<T>>>(c)));
  }
  all["div." + type] = divide<T, true>;
  all["rem." + type] = divide<T, false>;
  BINARY("min." + type, T, (a < b ? a : b));
  BINARY("max." + type, T, (a > b ? a : b));
  UNARY("neg." + type, T, static_cast<T>(U{0} - static_cast<U>(a)));
  UNARY("abs." + type, T, static_cast<T>(a < T{0} ? U{0} - static_cast<U>(a) : static_cast<U>(a)));
  BINARY("setp.eq." + type, T, (a == b));
  BINARY("setp.ne." + type, T, (a != b));
  BINARY("setp.lt." + type, T, (a < b));
  BINARY("setp.le." + type, T, (a <= b));
  BINARY("setp.gt." + type, T, (a > b));
  BINARY("setp.ge." + type, T, (a >= b));
  all["shl." + type] = shift<T, true>;
  all["shr." + type] = shift<T, false>;
}

template <class T>
void add_bitwise(Operations& all, const std::string& type) {
  BINARY("and." + type, T, static_cast<T>(a & b));
  BINARY("or." + type, T, static_cast<T>(a | b));
  BINARY("xor." + type, T, static_cast<T>(a ^ b));
  UNARY("not." + type, T, static_cast<T>(~a));
  // PTX has names of their own for comparisons of unsigned numbers.
  for (const auto& [other, name] : {std::pair{"lo", "lt"}, {"ls", "le"}, {"hi", "gt"}, {"hs", "ge"}})
    all[std::string("setp.") + other + "." + type] = all[std::string("setp.") + name + "." + type];
}

// Comparisons with a NaN are false, but for those whose names end with u.
template <class T>
void add_floats(Operations& all, const std::string& type) {
  BINARY("add." + type, T, a + b);
  BINARY("sub." + type, T, a - b);
  BINARY("mul." + type, T, a * b);
  BINARY("div." + type, T, a / b);
  TERNARY("fma." + type, T, std::fma(a, b, get<T>(c)));
  UNARY("sqrt." + type, T, std::sqrt(a));
  UNARY("neg." + type, T, -a);
  UNARY("abs." + type, T, std::fabs(a));
  BINARY("min." + type, T, std::fmin(a, b));
  BINARY("max." + type, T, std::fmax(a, b));
  BINARY("setp.eq." + type, T, (a == b));
  BINARY("setp.ne." + type, T, (a < b || a > b));
  BINARY("setp.lt." + type, T, (a < b));
  BINARY("setp.le." + type, T, (a <= b));
  BINARY("setp.gt." + type, T, (a > b));
  BINARY("setp.ge." + type, T, (a >= b));
  BINARY("setp.equ." + type, T, !(a < b || a > b));
  BINARY("setp.neu." + type, T, (a != b));
  BINARY("setp.ltu." + type, T, !(a >= b));
  BINARY("setp.leu." + type, T, !(a > b));
  BINARY("setp.gtu." + type, T, !(a <= b));
  BINARY("setp.geu." + type, T, !(a < b));
  BINARY("setp.num." + type, T, (a == a && b == b));
  BINARY("setp.nan." + type, T, (a != a || b != b));
}

// prmt: each nibble of the selector chooses one of the eight bytes; its top bit spreads that byte's sign.
uint32_t chosen_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15;
    auto byte = static_cast<uint8_t>(both >> 8 * (nibble & 7));
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= uint32_t{byte} << 8 * i;
  }
  return out;
}

// bfe: `length` bits from bit `begin` on; a signed field is extended by its last bit.
template <class T>
T extracted_bits(T value, uint32_t begin, uint32_t length) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  begin &= 0xff;
  length &= 0xff;
  const uint32_t last = begin + length - 1 < kBits - 1 ? begin + length - 1 : kBits - 1;
  const bool sign = std::is_signed_v<T> && length != 0 && (value >> last & 1);
  T out = 0;
  for (uint32_t i = 0; i < kBits; ++i) {
    const bool bit = i < length && begin + i < kBits ? (value >> (begin + i) & 1) != 0 : sign;
    if (bit) out = static_cast<T>(out | static_cast<T>(T{1} << i));
  }
  return out;
}

uint64_t concatenated(uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }
constexpr uint64_t kUpperHalf = 0xffffffff00000000;

}  // namespace

void add_arithmetic(Operations& all) {
  add_integers<uint16_t>(all, "u16");
  add_integers<int16_t>(all, "s16");
  add_integers<uint32_t>(all, "u32");
  add_integers<int32_t>(all, "s32");
  add_integers<uint64_t>(all, "u64");
  add_integers<int64_t>(all, "s64");
  add_bitwise<uint16_t>(all, "u16");
  add_bitwise<uint32_t>(all, "u32");
  add_bitwise<uint64_t>(all, "u64");
  add_floats<float>(all, "f32");
  add_floats<double>(all, "f64");
  BINARY("and.pred", bool, a&& b);
  BINARY("or.pred", bool, a || b);
  BINARY("xor.pred", bool, a != b);
  UNARY("not.pred", bool, !a);
  TERNARY("prmt.u32", uint32_t, chosen_bytes(a, b, static_cast<uint32_t>(c)));
  TERNARY("shf.l.wrap.u32", uint32_t, static_cast<uint32_t>(concatenated(a, b) << (c & 31) >> 32));
  TERNARY("shf.r.wrap.u32", uint32_t, static_cast<uint32_t>(concatenated(a, b) >> (c & 31)));
  TERNARY("bfe.u32", uint32_t, extracted_bits<uint32_t>(a, b, static_cast<uint32_t>(c)));
  TERNARY("bfe.s32", int32_t, extracted_bits<int32_t>(a, static_cast<uint32_t>(b), static_cast<uint32_t>(c)));
  // An approximation that reads and returns the upper 32 bits; the ISA leaves its last bit open.
  UNARY("rcp.approx.ftz.f64", double, get<double>(put(1.0 / get<double>(put(a) & kUpperHalf)) & kUpperHalf));
}

}  // namespace ptx
