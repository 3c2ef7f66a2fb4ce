// Compiled once per instruction set (kernels.h).
#include "backends/cpu/kernels.h"
#include "backends/cpu/lanes.h"
#include "core/dispatch.h"

namespace mgpu::cpu::MGPU_LEVEL {
namespace {

struct Sum {
  template <class V>
  static MGPU_INLINE V apply(V a, V b) {
    return a + b;
  }
};
struct Prod {
  template <class V>
  static MGPU_INLINE V apply(V a, V b) {
    return a * b;
  }
};
// A NaN on either side wins: it is kept when it is `a`, and no comparison lets it go when it is `b`.
struct Min {
  template <class V>
  static MGPU_INLINE V apply(V a, V b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Max {
  template <class V>
  static MGPU_INLINE V apply(V a, V b) {
    return (a > b) | (a != a) ? a : b;
  }
};

// Where small integers are divided: wide enough that the quotient, cut toward zero, is that of the integers.
template <class T>
using Quotient = std::conditional_t<sizeof(T) == 1, float, std::conditional_t<sizeof(T) == 4, double, int64_t>>;

// Integers are added as unsigned, where overflow wraps, and divided as what they are, toward zero.
template <class V, class Signed>
MGPU_INLINE V divide(V sum, int divisor, Signed) {
  if (divisor == 1) return sum;
  if constexpr (std::is_floating_point_v<Signed>) {
    return sum / static_cast<Signed>(divisor);
  } else {
    Signed values[sizeof(V) / sizeof(Signed)];
    std::memcpy(values, &sum, sizeof sum);
    for (Signed& value : values)
      value = static_cast<Signed>(static_cast<Quotient<Signed>>(value) / static_cast<Quotient<Signed>>(divisor));
    std::memcpy(&sum, values, sizeof sum);
    return sum;
  }
}

// T: the element in memory; Signed: how it is divided.
template <class T, class Signed, class Op>
struct Kernel {
  using L = Lanes<T>;
  using V = typename L::Vector;
  static constexpr int kUnroll = 128 / kVectorNbytes;  // two cache lines of each input at a time
  static constexpr int kStep = kUnroll * L::count;

  static MGPU_INLINE const T* in(const Reduction& r, int rank, int64_t i) {
    return static_cast<const T*>(r.in[rank]) + i;
  }
  static MGPU_INLINE T* out(const Reduction& r, int rank, int64_t i) { return static_cast<T*>(r.out[rank]) + i; }

  static MGPU_INLINE void prefetch(const Reduction& r, int64_t i) {
    for (int rank = 0; rank < r.in_count; ++rank)
      for (size_t line = 0; line < kStep * sizeof(T); line += 64)
        prefetch_ahead(reinterpret_cast<const char*>(in(r, rank, i)) + line);
  }

  static MGPU_INLINE int64_t whole_vectors(const Reduction& r) {
    int64_t i = r.begin;
    for (; i + kStep <= r.end; i += kStep) {
      V acc[kUnroll];
      prefetch(r, i);
      for (int u = 0; u < kUnroll; ++u) acc[u] = L::load(in(r, 0, i) + u * L::count);
      for (int rank = 1; rank < r.in_count; ++rank)
        for (int u = 0; u < kUnroll; ++u) acc[u] = Op::apply(acc[u], L::load(in(r, rank, i) + u * L::count));
      for (int u = 0; u < kUnroll; ++u) acc[u] = divide(acc[u], r.divisor, Signed{});
      for (int rank = 0; rank < r.out_count; ++rank)
        for (int u = 0; u < kUnroll; ++u) L::store(out(r, rank, i) + u * L::count, acc[u]);
    }
    return i;
  }

  // The rest goes through the same arithmetic, a padded vector at a time, so that no element is added another way.
  static MGPU_INLINE void tail(const Reduction& r, int64_t i) {
    while (i < r.end) {
      const int64_t left = r.end - i < L::count ? r.end - i : L::count;
      T pad[L::count] = {};
      std::memcpy(pad, in(r, 0, i), left * sizeof(T));
      V acc = L::load(pad);
      for (int rank = 1; rank < r.in_count; ++rank) {
        std::memcpy(pad, in(r, rank, i), left * sizeof(T));
        acc = Op::apply(acc, L::load(pad));
      }
      L::store(pad, divide(acc, r.divisor, Signed{}));
      for (int rank = 0; rank < r.out_count; ++rank) std::memcpy(out(r, rank, i), pad, left * sizeof(T));
      i += left;
    }
  }

  static MGPU_INLINE void run(const Reduction& r) { tail(r, whole_vectors(r)); }
};

// Wrapping: the type in which sums and products are taken; Ordered: the one in which min and max compare.
template <class Wrapping, class Ordered, class Signed>
MGPU_INLINE void run_op(const Reduction& r) {
  switch (r.op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return Kernel<Wrapping, Signed, Sum>::run(r);
    case ReduceOp::prod:
      return Kernel<Wrapping, Signed, Prod>::run(r);
    case ReduceOp::min:
      return Kernel<Ordered, Signed, Min>::run(r);
    case ReduceOp::max:
      return Kernel<Ordered, Signed, Max>::run(r);
  }
}

// Not inlined, one function per dtype: in a single function the compiler would give up optimizing.
template <class T>
__attribute__((noinline)) void reduce_as(const Reduction& r) {
  if constexpr (std::is_integral_v<T>)
    run_op<std::make_unsigned_t<T>, T, T>(r);
  else
    run_op<T, T, typename Lanes<T>::Scalar>(r);
}

}  // namespace

void reduce(const Reduction& r) {
  dispatch_dtype<Elements>(r.dtype, "sum_ranks", [&](auto one) { reduce_as<decltype(one)>(r); });
}

}  // namespace mgpu::cpu::MGPU_LEVEL
