// How plain instructions are defined: by name, 32 lanes of registers in, 32 lanes out.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#include "fakes/ptx/run.h"

namespace ptx {

using Operations = std::map<std::string, Operation>;
void add_arithmetic(Operations& all);
void add_conversions(Operations& all);
void add_data_movement(Operations& all);  // ld, st, mov and its like

template <class T>
T get(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);  // little endian
  return value;
}
// A float32 result that is NaN has one bit pattern on a GPU; a float64 one keeps the host's.
template <class T>
uint64_t put(T value) {
  if constexpr (std::is_same_v<T, float>)
    if (value != value) return 0x7fffffff;
  if constexpr (std::is_same_v<T, bool>) return value;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
// Signed values are extended to the width of the register.
template <class T>
uint64_t put(T value, int width) {
  if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    const auto wide = static_cast<uint64_t>(static_cast<int64_t>(value));
    return width == 8 ? wide : wide & ((uint64_t{1} << 8 * width) - 1);
  } else {
    return put(value);
  }
}

// The value of an integer, and its bits in a register: a signed value fills `width` bytes, an unsigned one its own.
int64_t extended(uint64_t bits, Type type);
uint64_t truncated(int64_t value, Type type, int width);

template <class T, class F>
void unary(Warp& warp, const Instruction& instruction, uint32_t lanes, F f) {
  const uint64_t* a = warp.from(instruction.from[0]);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes, [&](int lane) { to[lane] = put(f(get<T>(a[lane])), instruction.width[0]); });
}
template <class T, class F>
void binary(Warp& warp, const Instruction& instruction, uint32_t lanes, F f) {
  const uint64_t *a = warp.from(instruction.from[0]), *b = warp.from(instruction.from[1]);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes, [&](int lane) { to[lane] = put(f(get<T>(a[lane]), get<T>(b[lane])), instruction.width[0]); });
}
// The third operand may have another type, so `f` takes its bits.
template <class T, class F>
void ternary(Warp& warp, const Instruction& instruction, uint32_t lanes, F f) {
  const uint64_t *a = warp.from(instruction.from[0]), *b = warp.from(instruction.from[1]),
                 *c = warp.from(instruction.from[2]);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes,
            [&](int lane) { to[lane] = put(f(get<T>(a[lane]), get<T>(b[lane]), c[lane]), instruction.width[0]); });
}

// Defines an operation by an expression of `a`, `b` and the bits `c`.  A macro, because the operation must be a plain
// function: the expression becomes part of its type.
#define UNARY(name, T, expression)                                      \
  all[name] = [](Warp& w, const Instruction& i, uint32_t l) {           \
    unary<T>(w, i, l, []([[maybe_unused]] T a) { return expression; }); \
  }
#define BINARY(name, T, expression) \
  all[name] = [](Warp& w, const Instruction& i, uint32_t l) { binary<T>(w, i, l, [](T a, T b) { return expression; }); }
#define TERNARY(name, T, expression)                                      \
  all[name] = [](Warp& w, const Instruction& i, uint32_t l) {             \
    ternary<T>(w, i, l, [](T a, T b, uint64_t c) { return expression; }); \
  }

}  // namespace ptx
