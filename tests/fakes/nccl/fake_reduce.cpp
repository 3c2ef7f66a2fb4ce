// The arithmetic of the fake: every rank's elements one after the other, half precision in float.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fakes/nccl/fake_state.h"

namespace fake_nccl {
namespace {

constexpr size_t kItemsize[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // int8 uint8 int32 uint32 int64 uint64 f16 f32 f64 bf16

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float widen(Brain value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
float widen(Half value) {
  const int exponent = value.bits >> 10 & 31, mantissa = value.bits & 1023;
  float size = std::ldexp(static_cast<float>(exponent ? mantissa + 1024 : mantissa), std::max(exponent, 1) - 25);
  if (exponent == 31) size = mantissa ? NAN : INFINITY;
  return value.bits & 0x8000 ? -size : size;
}
template <class T>
T widen(T value) {
  return value;
}

void narrow(float value, Brain& out) {
  const uint32_t bits = bits_of(value);
  out.bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// Counts the steps of the size that halves have there: 1024 to 2047 of them, or fewer below the smallest normal one.
void narrow(float value, Half& out) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  int exponent = 0;
  std::frexp(size, &exponent);
  const int unit = size == 0 ? -24 : std::max(exponent - 11, -24);
  const auto steps = [&] { return static_cast<uint16_t>(std::nearbyint(std::ldexp(size, -unit))); };
  if (std::isnan(value))
    out.bits = 0x7e00;
  else
    out.bits = sign | (size >= 65520.0f ? 0x7c00 : static_cast<uint16_t>(((unit + 24) << 10) + steps()));
}
template <class T>
void narrow(T value, T& out) {
  out = value;
}

// Sums and products of integers wrap.
template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  else
    return a + b;
}
template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  else
    return a * b;
}
template <class T>
T combine(T a, T b, int op) {
  if (op == 1) return multiply(a, b);
  if (op == 2) return a > b || a != a ? a : b;
  if (op == 3) return a < b || a != a ? a : b;
  return add(a, b);
}
// An integer's average goes down here, so that a backend that relied on NCCL for it would be found out.
template <class T>
T averaged(T sum, size_t ranks) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(std::floor(static_cast<double>(sum) / static_cast<double>(ranks)));
  else
    return sum / static_cast<T>(ranks);
}

using Inputs = std::vector<const void*>;

template <class T>
void reduce(const Inputs& in, size_t begin, size_t count, int op, char* out) {
  for (size_t i = 0; i < count; ++i) {
    auto value = widen(static_cast<const T*>(in[0])[begin + i]);
    for (size_t rank = 1; rank < in.size(); ++rank)
      value = combine(value, widen(static_cast<const T*>(in[rank])[begin + i]), op);
    if (op == 4) value = averaged(value, in.size());
    narrow(value, reinterpret_cast<T*>(out)[i]);
  }
}

using Bytes = std::vector<char>;

Bytes reduced(const std::vector<Part*>& parts, size_t begin) {
  using Reduce = void (*)(const Inputs&, size_t, size_t, int, char*);
  constexpr Reduce kReduce[] = {reduce<int8_t>,   reduce<uint8_t>, reduce<int32_t>, reduce<uint32_t>, reduce<int64_t>,
                                reduce<uint64_t>, reduce<Half>,    reduce<float>,   reduce<double>,   reduce<Brain>};
  Inputs in;
  for (const Part* part : parts) in.push_back(part->in);
  Bytes out(parts[0]->count * kItemsize[parts[0]->dtype]);
  kReduce[parts[0]->dtype](in, begin, parts[0]->count, parts[0]->op, out.data());
  return out;
}

void store(Part* part, const Bytes& bytes) {
  if (!bytes.empty()) std::memcpy(part->out, bytes.data(), bytes.size());
}
Bytes loaded(const Part& part) {
  const char* begin = static_cast<const char*>(part.in);
  return Bytes(begin, begin + part.count * kItemsize[part.dtype]);
}

void scatter(const std::vector<Part*>& parts) {
  std::vector<Bytes> chunks;
  for (size_t rank = 0; rank < parts.size(); ++rank) chunks.push_back(reduced(parts, rank * parts[0]->count));
  for (size_t rank = 0; rank < parts.size(); ++rank) store(parts[rank], chunks[rank]);
}

void gather(const std::vector<Part*>& parts) {
  Bytes whole;
  for (const Part* part : parts) {
    const Bytes bytes = loaded(*part);
    whole.insert(whole.end(), bytes.begin(), bytes.end());
  }
  for (Part* part : parts) store(part, whole);
}

bool agree(const Part& one, const Part& other) {
  return one.kind == other.kind && one.count == other.count && one.dtype == other.dtype && one.op == other.op &&
         one.root == other.root;
}

}  // namespace

bool run_collective(const std::vector<Part*>& parts) {
  const Part& first = *parts[0];
  for (const Part* part : parts)
    if (!agree(first, *part)) return false;
  if (first.kind == Kind::reduce_scatter) scatter(parts);
  if (first.kind == Kind::all_gather) gather(parts);
  if (first.kind == Kind::reduce) store(parts[first.root], reduced(parts, 0));
  if (first.kind == Kind::all_reduce || first.kind == Kind::broadcast) {
    const Bytes bytes = first.kind == Kind::broadcast ? loaded(*parts[first.root]) : reduced(parts, 0);
    for (Part* part : parts) store(part, bytes);
  }
  return true;
}

bool run_message(const Part& send, const Part& receive) {
  if (send.count != receive.count || send.dtype != receive.dtype) return false;
  if (send.count) std::memmove(receive.out, send.in, send.count * kItemsize[send.dtype]);
  return true;
}

}  // namespace fake_nccl
