// cvt: between integers, floats, and both.
#include <cmath>

#include "fakes/ptx/operations.h"

namespace ptx {
int64_t extended(uint64_t bits, Type type) {
  switch (type) {
    case Type::s8:
      return get<int8_t>(bits);
    case Type::s16:
      return get<int16_t>(bits);
    case Type::s32:
      return get<int32_t>(bits);
    case Type::u8:
      return get<uint8_t>(bits);
    case Type::u16:
      return get<uint16_t>(bits);
    case Type::u32:
      return get<uint32_t>(bits);
    default:
      return static_cast<int64_t>(bits);
  }
}

uint64_t truncated(int64_t value, Type type, int width) {
  const int nbytes = is_signed(type) ? width : size_of(type);
  if (is_signed(type)) value = extended(static_cast<uint64_t>(value), type);
  return nbytes == 8 ? static_cast<uint64_t>(value) : static_cast<uint64_t>(value) & ((uint64_t{1} << 8 * nbytes) - 1);
}

namespace {

double to_double(uint64_t bits, Type type) {
  switch (type) {
    case Type::f16:
      return get<_Float16>(bits);
    case Type::bf16:
      return get<float>(bits << 16);
    case Type::f32:
      return get<float>(bits);
    default:
      return get<double>(bits);
  }
}

// Rounds once, to nearest and ties to even: a value that is not float64 came from 32 bits or fewer, which a double
// holds.
uint64_t from_double(double value, Type type) {
  switch (type) {
    case Type::f16:
      return value != value ? 0x7fff : put(static_cast<_Float16>(value));
    case Type::bf16: {
      if (value != value) return 0x7fff;
      const uint64_t bits = put(static_cast<float>(value));
      return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    case Type::f32:
      return put(static_cast<float>(value));
    default:
      return put(value);
  }
}

uint64_t integer_to_float(uint64_t bits, Type from, Type to) {
  const int64_t whole = extended(bits, from);
  const bool is_u64 = from == Type::u64;
  if (to == Type::f64) return put(is_u64 ? static_cast<double>(bits) : static_cast<double>(whole));
  const float rounded = is_u64 ? static_cast<float>(bits) : static_cast<float>(whole);
  return to == Type::f32 ? put(rounded) : from_double(rounded, to);
}

// Toward zero; what does not fit becomes the nearest value that does, NaN becomes 0.
uint64_t float_to_integer(uint64_t bits, Type from, Type to, int width) {
  const double value = std::trunc(to_double(bits, from));
  const int digits = 8 * size_of(to) - is_signed(to);
  const double least = is_signed(to) ? -std::ldexp(1.0, digits) : 0, beyond = std::ldexp(1.0, digits);
  const uint64_t most = digits == 64 ? ~uint64_t{0} : (uint64_t{1} << digits) - 1;
  int64_t whole = 0;
  if (value >= beyond)
    whole = static_cast<int64_t>(most);
  else if (value < least)
    whole = static_cast<int64_t>(least);
  else if (value == value)
    whole = is_signed(to) ? static_cast<int64_t>(value) : static_cast<int64_t>(static_cast<uint64_t>(value));
  return truncated(whole, to, width);
}

uint64_t converted(uint64_t bits, const Instruction& instruction) {
  const Type from = instruction.source_type, to = instruction.type;
  const bool toward_zero = instruction.offset != 0;
  if (is_float(from) && is_float(to)) {
    const double value = to_double(bits, from);
    return from_double(toward_zero ? std::trunc(value) : value, to);
  }
  if (is_float(to)) return integer_to_float(bits, from, to);
  if (is_float(from)) return float_to_integer(bits, from, to, instruction.width[0]);
  return truncated(extended(bits, from), to, instruction.width[0]);
}

void convert(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* a = warp.from(instruction.from[0]);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes, [&](int lane) { to[lane] = converted(a[lane], instruction); });
}

}  // namespace

void add_conversions(Operations& all) { all["cvt"] = convert; }

}  // namespace ptx
