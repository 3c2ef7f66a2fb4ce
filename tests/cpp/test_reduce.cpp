// The kernels of every instruction set that this processor has, against arithmetic done one element at a time: each
// dtype, op, count around the vector widths, and misaligned start; the half-precision types for all 65536 values.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backends/cpu/kernels.h"
#include "check.h"

using namespace mgpu;
using namespace mgpu::cpu;

static Kernels tested;  // the level that the checks below run on

template <class T>
static T one(const std::vector<T>& values, ReduceOp op) {
  using U = std::conditional_t<std::is_integral_v<T>,
                               std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>, T>;
  T acc = values[0];
  for (size_t i = 1; i < values.size(); ++i) {
    const T b = values[i];
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        acc = static_cast<T>(static_cast<U>(acc) + static_cast<U>(b));
        break;
      case ReduceOp::prod:
        acc = static_cast<T>(static_cast<U>(acc) * static_cast<U>(b));
        break;
      case ReduceOp::min:
        acc = (b < acc || b != b) ? b : acc;
        break;
      case ReduceOp::max:
        acc = (b > acc || b != b) ? b : acc;
        break;
    }
  }
  if (op == ReduceOp::avg) acc = static_cast<T>(acc / static_cast<T>(values.size()));
  return acc;
}

template <class T>
static void all_counts(DType dtype) {
  for (int ranks : {1, 2, 3, 8})
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max})
      for (int64_t count : {0, 1, 3, 31, 32, 33, 127, 128, 129, 300})
        for (int64_t offset : {0, 1}) {
          std::vector<std::vector<T>> in(ranks, std::vector<T>(count + 2));
          for (int rank = 0; rank < ranks; ++rank)
            for (int64_t i = 0; i < count + 2; ++i) in[rank][i] = static_cast<T>((rank * 7 + i * 5) % 11 - 3);
          std::vector<T> out(count + 2, static_cast<T>(99));
          std::vector<const void*> from;
          for (auto& buffer : in) from.push_back(buffer.data() + offset);
          void* to = out.data() + offset;
          tested.reduce({from.data(), ranks, &to, 1, 0, count, dtype, op, op == ReduceOp::avg ? ranks : 1});
          for (int64_t i = 0; i < count; ++i) {
            std::vector<T> column;
            for (auto& buffer : in) column.push_back(buffer[i + offset]);
            CHECK(out[i + offset] == one(column, op));
          }
          CHECK(out[count + offset] == static_cast<T>(99) && (offset == 0 || out[0] == static_cast<T>(99)));
        }
}

// Averages of the largest and smallest numbers, and around the multiples of the divisor.
template <class T>
static void averages(DType dtype, T least, T most) {
  for (int divisor : {2, 3, 7, 8, 255, 65537}) {
    std::vector<T> in;
    for (T base : {least, static_cast<T>(0), most})
      for (int i = -20; i <= 20; ++i)
        in.push_back(static_cast<T>(static_cast<uint64_t>(base) + static_cast<uint64_t>(i)));
    for (int times = 1; times < 40; ++times) in.push_back(static_cast<T>(divisor * times - 1));
    std::vector<T> out(in.size());
    const void* from = in.data();
    void* to = out.data();
    tested.reduce({&from, 1, &to, 1, 0, static_cast<int64_t>(in.size()), dtype, ReduceOp::avg, divisor});
    for (size_t i = 0; i < in.size(); ++i) CHECK(out[i] == static_cast<T>(static_cast<int64_t>(in[i]) / divisor));
  }
}

static float half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

static float brain_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// What is nearest to `value`, ties to even, in a format with `digits` digits, whose last position is worth at least
// 2^least, and which ends below 2^end.
static float rounded(float value, int digits, int least, int end) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int position = std::max(std::ilogb(value) - digits + 1, least);
  const float result = std::ldexp(std::nearbyint(std::ldexp(value, -position)), position);
  return std::fabs(result) < std::ldexp(1.0f, end) || end > 127 ? result : std::copysign(INFINITY, value);
}

struct Half {
  DType dtype;
  float (*value)(uint16_t bits);
  int digits, least, end;
};
static const Half kHalves[] = {{DType::f16, half_value, 11, -24, 16}, {DType::bf16, brain_value, 8, -133, 128}};

static bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// Every value meets a few others: added, multiplied, and alone.
static void halves(const Half& half) {
  std::vector<uint16_t> all(65536), other(65536), out(65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) all[bits] = static_cast<uint16_t>(bits);
  const void* from[] = {all.data(), other.data()};
  void* to = out.data();
  for (uint16_t bits : {0x0000, 0x0001, 0x3c01, 0x3801, 0x7bff, 0x8401, 0x3f7f, 0x7c00}) {
    std::fill(other.begin(), other.end(), bits);
    const float b = half.value(bits);
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::prod}) {
      tested.reduce({from, 2, &to, 1, 0, 65536, half.dtype, op, 1});
      for (uint32_t i = 0; i < 65536; ++i) {
        const float a = half.value(all[i]), exact = op == ReduceOp::sum ? a + b : a * b;
        CHECK(same(half.value(out[i]), rounded(exact, half.digits, half.least, half.end)));
      }
    }
  }
  tested.reduce({from, 1, &to, 1, 0, 65536, half.dtype, ReduceOp::sum, 1});
  for (uint32_t i = 0; i < 65536; ++i) CHECK(out[i] == all[i] || std::isnan(half.value(all[i])));
}

// Rows of one byte that is zero: the result is the shift, rounded.
static void conversions(const Half& half) {
  const uint8_t row = 0;
  const int64_t index = 0;
  for (float value : {2049.0f, 2051.0f, 65519.0f, 65520.0f, std::ldexp(1.0f, -25), std::ldexp(1.5f, -25), -65536.0f,
                      1e30f, std::ldexp(1.0f, -134), 3.4e38f, 1.00390625f, 1.01171875f}) {
    uint16_t out;
    tested.gather_rows({&row, 1, 1, &index, 1, 1.0f, value, &out, half.dtype}, 0, 1);
    CHECK(same(half.value(out), rounded(value, half.digits, half.least, half.end)));
  }
}

static void nan_wins() {
  for (ReduceOp op : {ReduceOp::min, ReduceOp::max})
    for (int position = 0; position < 3; ++position) {
      float values[3][40];
      for (auto& row : values)
        for (float& value : row) value = 1;
      for (float& value : values[position]) value = NAN;
      const void* from[] = {values[0], values[1], values[2]};
      float out[40];
      void* to = out;
      tested.reduce({from, 3, &to, 1, 0, 40, DType::f32, op, 1});
      for (float value : out) CHECK(std::isnan(value));
    }
}

// Not a bit differs between the levels, in a NaN neither.
static void levels_agree() {
  for (const Half& half : kHalves) {
    std::vector<uint16_t> all(65536), first(65536), out(65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) all[bits] = static_cast<uint16_t>(bits);
    const void* from[] = {all.data(), all.data()};
    for (int ranks : {1, 2})
      for (ReduceOp op : {ReduceOp::sum, ReduceOp::max})
        for (const Kernels& level : usable_kernels()) {
          void* to = out.data();
          level.reduce({from, ranks, &to, 1, 0, 65536, half.dtype, op, 1});
          if (&level == &usable_kernels().front()) first = out;
          CHECK(out == first);
        }
  }
}

int main() {
  levels_agree();
  for (const Kernels& level : usable_kernels()) {
    tested = level;
    all_counts<float>(DType::f32);
    all_counts<double>(DType::f64);
    all_counts<int32_t>(DType::i32);
    all_counts<int64_t>(DType::i64);
    all_counts<uint8_t>(DType::u8);
    averages<int32_t>(DType::i32, INT32_MIN, INT32_MAX);
    averages<int64_t>(DType::i64, INT64_MIN, INT64_MAX);
    averages<uint8_t>(DType::u8, 0, 255);
    for (const Half& half : kHalves) halves(half), conversions(half);
    nan_wins();
  }
  return passed();
}
