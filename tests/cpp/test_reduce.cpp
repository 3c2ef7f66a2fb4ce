// The kernel against arithmetic done one element at a time, for every dtype, op, count around the vector widths, and
// misaligned start; and the half-precision conversions for all 65536 values.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "backends/cpu/lanes.h"
#include "backends/cpu/reduce.h"
#include "check.h"

using namespace mgpu;
using namespace mgpu::cpu;

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
          reduce({from.data(), ranks, &to, 1, 0, count, dtype, op, op == ReduceOp::avg ? ranks : 1});
          for (int64_t i = 0; i < count; ++i) {
            std::vector<T> column;
            for (auto& buffer : in) column.push_back(buffer[i + offset]);
            CHECK(out[i + offset] == one(column, op));
          }
          CHECK(out[count + offset] == static_cast<T>(99) && (offset == 0 || out[0] == static_cast<T>(99)));
        }
}

static float half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

static void halves() {
  for (uint32_t bits = 0; bits < 65536; bits += 8) {
    U16x8 packed;
    for (int lane = 0; lane < 8; ++lane) packed[lane] = static_cast<uint16_t>(bits + lane);
    const F32x8 wide = widen(packed, F16{});
    const U16x8 again = narrow(wide, F16{});
    const F32x8 brain = widen(packed, BF16{});
    const U16x8 brain_again = narrow(brain, BF16{});
    for (int lane = 0; lane < 8; ++lane) {
      const float value = half_value(packed[lane]);
      CHECK(wide[lane] == value || (std::isnan(wide[lane]) && std::isnan(value)));
      CHECK(again[lane] == packed[lane] || std::isnan(value));
      CHECK(!std::isnan(value) || (again[lane] & 0x7c00) == 0x7c00);
      CHECK(brain_again[lane] == packed[lane] || std::isnan(brain[lane]));
    }
  }
  // Ties go to even, overflow to infinity, the smallest subnormal's half to zero.
  const F32x8 hard = {2049.0f,   2051.0f, 65519.0f, 65520.0f, std::ldexp(1.0f, -25), std::ldexp(1.5f, -25),
                      -65536.0f, 1e30f};
  const uint16_t wanted[] = {0x6800, 0x6802, 0x7bff, 0x7c00, 0x0000, 0x0001, 0xfc00, 0x7c00};
  const U16x8 narrowed = narrow(hard, F16{});
  for (int lane = 0; lane < 8; ++lane) CHECK(narrowed[lane] == wanted[lane]);
}

static void nan_wins() {
  for (ReduceOp op : {ReduceOp::min, ReduceOp::max})
    for (int place = 0; place < 3; ++place) {
      float values[3][40];
      for (auto& row : values)
        for (float& value : row) value = 1;
      for (float& value : values[place]) value = NAN;
      const void* from[] = {values[0], values[1], values[2]};
      float out[40];
      void* to = out;
      reduce({from, 3, &to, 1, 0, 40, DType::f32, op, 1});
      for (float value : out) CHECK(std::isnan(value));
    }
}

int main() {
  all_counts<float>(DType::f32);
  all_counts<double>(DType::f64);
  all_counts<int32_t>(DType::i32);
  all_counts<int64_t>(DType::i64);
  all_counts<uint8_t>(DType::u8);
  halves();
  nan_wins();
  return passed();
}
