// Small whole numbers in every dtype, as doubles: what tests write, read and expect.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/types.h"

namespace mgpu::fakes {

inline uint16_t half_of(double value) {
  if (value == 0) return 0;
  const int exponent = std::ilogb(value);
  const auto mantissa = static_cast<int>(std::ldexp(std::fabs(value), 10 - exponent)) - 1024;
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) + ((exponent + 15) << 10) + mantissa);
}
inline double half_value(uint16_t bits) {
  const double size = bits & 0x7fff ? std::ldexp((bits & 1023) + 1024, (bits >> 10 & 31) - 25) : 0;
  return bits & 0x8000 ? -size : size;
}

template <class T>
void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <class T>
double loaded(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return static_cast<double>(value);
}

// Elements of a dtype with one more behind them, which must stay as it is.
class Numbers {
 public:
  Numbers(DType dtype, int64_t count) : dtype_(dtype), count_(count), bytes_((count + 1) * itemsize(dtype), 0x55) {}

  void set(int64_t i, double value) {
    void* to = bytes_.data() + i * static_cast<int64_t>(itemsize(dtype_));
    const float single = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    if (dtype_ == DType::f16) store(to, half_of(value));
    if (dtype_ == DType::bf16) store(to, static_cast<uint16_t>(bits >> 16));
    if (dtype_ == DType::f32) store(to, single);
    if (dtype_ == DType::f64) store(to, value);
    if (dtype_ == DType::i32) store(to, static_cast<int32_t>(value));
    if (dtype_ == DType::i64) store(to, static_cast<int64_t>(value));
    if (dtype_ == DType::u8) store(to, static_cast<uint8_t>(static_cast<int64_t>(value)));
  }
  double get(int64_t i) const {
    const void* from = bytes_.data() + i * static_cast<int64_t>(itemsize(dtype_));
    uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits) < itemsize(dtype_) ? sizeof bits : itemsize(dtype_));
    const uint32_t widened = static_cast<uint32_t>(bits) << 16;
    switch (dtype_) {
      case DType::f16:
        return half_value(bits);
      case DType::bf16:
        return loaded<float>(&widened);
      case DType::f32:
        return loaded<float>(from);
      case DType::f64:
        return loaded<double>(from);
      case DType::i32:
        return loaded<int32_t>(from);
      case DType::i64:
        return loaded<int64_t>(from);
      default:
        return loaded<uint8_t>(from);
    }
  }
  bool guarded() const {
    for (size_t i = count_ * itemsize(dtype_); i < bytes_.size(); ++i)
      if (bytes_[i] != 0x55) return false;
    return true;
  }
  Buffer buffer() { return {bytes_.data(), count_, dtype_}; }

 private:
  DType dtype_;
  int64_t count_;
  std::vector<unsigned char> bytes_;
};

}  // namespace mgpu::fakes
