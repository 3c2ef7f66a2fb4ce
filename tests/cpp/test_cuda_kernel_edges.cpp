// The edges of every CUDA kernel: each rounding boundary of half precision, each phase of alignment, tables of both
// sizes and longer ones, whole and partial tiles, numbers that float32 cannot hold, segments of every kind.  The
// reference is the CPU backend, but for roundings, which are made here one by one.
#include <cmath>
#include <limits>
#include <random>

#include "kernel_tests.h"

static std::mt19937 random_bits(11);
static int64_t between(int64_t least, int64_t most) {
  return least + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(most - least + 1));
}
static int64_t phases_of(DType dtype) { return 16 / static_cast<int64_t>(itemsize(dtype)); }

// Values with all bits in use: any integers, and fractions between -8 and 8.
static Bytes values_of(int64_t count, DType dtype) {
  if (!is_floating(dtype)) {
    Bytes bytes(static_cast<size_t>(count) * itemsize(dtype));
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random_bits());
    return bytes;
  }
  std::vector<double> wide(static_cast<size_t>(count));
  for (double& value : wide) value = (static_cast<double>(random_bits()) / 4294967296.0 - 0.5) * 16;
  Bytes bytes(static_cast<size_t>(count) * itemsize(dtype));
  host().scale_cast({wide.data(), DType::f64, bytes.data(), dtype, count, 1.0}, {});
  return bytes;
}
static Both both(int64_t count, DType dtype, int64_t offset = 0) { return {values_of(count, dtype), dtype, offset}; }

template <class T>
static Bytes bytes_of(const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const unsigned char*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}
template <class T>
static std::vector<T> as(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(static_cast<void*>(values.data()), bytes.data(), bytes.size());
  return values;
}

// ---- roundings

static float half_of(uint16_t bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  double value = exponent == 0 ? std::ldexp(digits, -24) : std::ldexp(1024 + digits, exponent - 25);
  if (exponent == 31) value = digits ? std::nan("") : HUGE_VAL;
  return static_cast<float>(bits >> 15 ? -value : value);
}
static uint16_t bits_of_half(float value) {  // to nearest, ties to even
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(static_cast<double>(value));
  if (size >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
  const int exponent = std::max(-14, size > 0 ? std::ilogb(size) : -14);
  const auto digits = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // a carry raises the exponent
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + digits));
}
static uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static uint16_t bits_of_brain(float value) {  // to nearest, ties to even
  const uint32_t bits = bits_of_float(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// All halves, their neighbours in float32, and the points between two halves with theirs.
static std::vector<float> boundaries(bool brain) {
  std::vector<float> all;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float here = brain ? float_of(bits << 16) : half_of(static_cast<uint16_t>(bits));
    const float next = brain ? float_of((bits + 1) << 16) : half_of(static_cast<uint16_t>(bits + 1));
    for (float value : {here, (here + next) / 2}) {
      all.push_back(value);
      all.push_back(std::nextafter(value, std::numeric_limits<float>::infinity()));
      all.push_back(std::nextafter(value, -std::numeric_limits<float>::infinity()));
    }
  }
  return all;
}

static void roundings() {
  for (bool brain : {false, true}) {
    const auto in = boundaries(brain);
    DeviceMemory<float> from(in);
    DeviceMemory<uint16_t> to(std::vector<uint16_t>(in.size()));
    const DType dtype = brain ? DType::bf16 : DType::f16;
    gpu().scale_cast({from.data(), DType::f32, to.data(), dtype, static_cast<int64_t>(in.size()), 1.0}, on());
    const auto made = to.values(stream);
    for (size_t i = 0; i < in.size(); ++i) {
      if (std::isnan(in[i]))
        CHECK(brain ? std::isnan(float_of(uint32_t{made[i]} << 16)) : std::isnan(half_of(made[i])));
      else
        CHECK(made[i] == (brain ? bits_of_brain(in[i]) : bits_of_half(in[i])));
    }
  }
}

static void every_half_widens() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (bool brain : {false, true}) {
    DeviceMemory<uint16_t> from(all);
    DeviceMemory<double> to(std::vector<double>(all.size()));
    gpu().scale_cast({from.data(), brain ? DType::bf16 : DType::f16, to.data(), DType::f64, 65536, -0.5}, on());
    const auto made = to.values(stream);
    for (size_t i = 0; i < all.size(); ++i) {
      const double value = -0.5 * (brain ? float_of(uint32_t{all[i]} << 16) : half_of(all[i]));
      CHECK(made[i] == value || (std::isnan(made[i]) && std::isnan(value)));
    }
  }
}

// ---- casts and copies

static void cast_once(DType from, DType to, int64_t count, int64_t from_phase, int64_t to_phase) {
  Both in = both(count, from, from_phase), out = both(count, to, to_phase);
  gpu().scale_cast({in.device.data(), from, out.device.data(), to, count, 0.375}, on());
  host().scale_cast({in.twin.data(), from, out.twin.data(), to, count, 0.375}, {});
  out.check_equal();
}

static void casts_at_all_phases() {
  for (DType from : kFloating)
    for (DType to : kFloating) {
      for (int64_t one = 0; one < phases_of(from); ++one)
        for (int64_t other = 0; other < phases_of(to); ++other) cast_once(from, to, between(1, 60), one, other);
      for (int64_t count : {8192, 16'384 + 31}) {  // whole tiles, and a partial one
        cast_once(from, to, count, 0, 0);
        cast_once(from, to, count, 1, 1);
      }
    }
}

static void copies_at_all_distances() {
  for (int64_t to = 0; to < 16; ++to)
    for (int64_t from = 0; from < 16; ++from) {
      std::vector<Both> in, out;
      std::vector<CopyBlock> blocks;
      for (int64_t count : {int64_t{1}, int64_t{47}, to == 0 ? int64_t{16'384 * 2 + 77} : int64_t{300}}) {
        in.push_back(both(count, DType::u8, from));
        out.push_back(both(count, DType::u8, to));
        blocks.push_back({nullptr, nullptr, 1, count, count, count});
      }
      for (size_t i = 0; i < in.size(); ++i) {
        blocks[i].to = out[i].device.data();
        blocks[i].from = in[i].device.data();
      }
      gpu().copy(blocks, on());
      for (size_t i = 0; i < in.size(); ++i) CHECK(out[i].device.values(stream) == in[i].twin);
    }
}

// Packs arrays of these counts and unpacks them again; some at odd phases.
static void pack_all(const std::vector<int64_t>& counts, DType dtype, DType flat_dtype, double scale, bool aligned) {
  std::vector<Both> arrays;
  Packing there{{}, dtype, nullptr, flat_dtype, scale}, truth = there;
  int64_t total = 0;
  for (int64_t count : counts) {
    arrays.push_back(both(count, dtype, aligned ? 0 : between(0, phases_of(dtype) - 1)));
    there.pieces.push_back({nullptr, total, count});
    total += count;
  }
  truth.pieces = there.pieces;
  for (size_t i = 0; i < arrays.size(); ++i) {
    there.pieces[i].pointer = arrays[i].device.data();
    truth.pieces[i].pointer = arrays[i].twin.data();
  }
  Both flat = both(total, flat_dtype);
  there.flat = flat.device.data();
  truth.flat = flat.twin.data();
  gpu().pack(there, on());
  host().pack(truth, {});
  flat.check_equal();
  gpu().unpack(there, on());
  host().unpack(truth, {});
  for (const Both& array : arrays) array.check_equal();
}

static void packs_of_both_table_sizes() {
  for (DType dtype : kFloating)
    for (DType flat_dtype : kFloating)
      for (int pieces : {5, 140}) {
        std::vector<int64_t> counts{8192 * 2, 8192 + 40, 4096, 7};
        while (static_cast<int>(counts.size()) < pieces) counts.push_back(16);
        pack_all(counts, dtype, flat_dtype, 0.5, true);
        pack_all(counts, dtype, flat_dtype, 0.5, false);
      }
  for (DType dtype : {DType::u8, DType::i64}) pack_all({16'384 * 2, 99, 16'384 * 2 + 5}, dtype, dtype, 1, true);
  for (int64_t distance : {1, 2, 4, 8}) {  // of bytes; whole tiles of each width, in both tables
    for (int pieces : {2, 130}) {
      std::vector<int64_t> counts{distance, 16'384 * 2};
      while (static_cast<int>(counts.size()) < pieces) counts.push_back(16);
      pack_all(counts, DType::u8, DType::u8, 1, true);
    }
  }
}

static void ten_thousand_pieces() {
  std::vector<int64_t> counts(10'000);
  for (int64_t& count : counts) count = between(1, 30);
  pack_all(counts, DType::f32, DType::bf16, 0.5, false);
  pack_all(counts, DType::u8, DType::u8, 1, false);
}

// ---- sums

struct Sums {
  int inputs, outputs = 1;
  bool aligned = true, in_place = false;
};
static void sum_once(DType dtype, ReduceOp op, int64_t count, const Sums& shape) {
  const int64_t phase = between(0, phases_of(dtype) - 1);
  std::vector<Both> in, out;
  for (int i = 0; i < shape.inputs; ++i)
    in.push_back(both(count, dtype, shape.aligned ? phase : between(0, phases_of(dtype) - 1)));
  for (int i = 0; i < shape.outputs; ++i) out.push_back(both(count, dtype, phase));
  SumRanks there{{}, {}, count, dtype, op, op == ReduceOp::avg ? 3 : 1}, truth = there;
  for (Both& each : in) {
    there.in.push_back(each.device.data());
    truth.in.push_back(each.twin.data());
  }
  for (Both& each : out) {
    const bool first = &each == &out[0] && shape.in_place;
    there.out.push_back(first ? in[0].device.data() : each.device.data());
    truth.out.push_back(first ? in[0].twin.data() : each.twin.data());
  }
  gpu().sum_ranks({there}, on());
  host().sum_ranks({truth}, {});
  for (const Both& each : out) each.check_equal();
  in[0].check_equal();
}

static void sums_of_all_shapes() {
  for (DType dtype : kAll)
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max}) {
      const int64_t whole = 1024 * phases_of(dtype), beyond = whole + 3 * phases_of(dtype) + 1;
      for (int inputs : {1, 2, 3, 4, 5, 8, 9}) {
        sum_once(dtype, op, beyond, {inputs});
        sum_once(dtype, op, between(1, 40), {inputs, 2, true, true});
        sum_once(dtype, op, inputs == 3 ? 1024 + 40 : 40, {inputs, 1, false});  // one by one; also a whole tile
      }
      for (int outputs : {3, 5, 8, 64}) {  // unrolled loops over the outputs, and their ends
        for (int inputs : {1, 2, 4, 8, 3}) sum_once(dtype, op, outputs == 64 ? 70 : beyond, {inputs, outputs});
        for (int inputs : {1, 3}) sum_once(dtype, op, 1024 + 40, {inputs, outputs, false});
        for (int inputs : {1, 2, 6}) sum_once(dtype, op, 9, {inputs, outputs});
      }
      sum_once(dtype, op, 1025, {64});
    }
}

static void many_sums(DType dtype, int calls, int inputs, bool aligned) {
  std::vector<std::vector<Both>> in(static_cast<size_t>(calls));
  std::vector<Both> out;
  std::vector<SumRanks> there, truth;
  for (int call = 0; call < calls; ++call) {
    const int64_t count = call < 2 ? 1024 * phases_of(dtype) + 35 : between(0, 60);
    const int64_t phase = between(0, phases_of(dtype) - 1);
    for (int i = 0; i < inputs; ++i)
      in[call].push_back(both(count, dtype, aligned ? phase : (phase + i) % phases_of(dtype)));
    out.push_back(both(count, dtype, phase));
    there.push_back({{}, {out[call].device.data()}, count, dtype, ReduceOp::sum, 1});
    truth.push_back({{}, {out[call].twin.data()}, count, dtype, ReduceOp::sum, 1});
    for (Both& each : in[call]) {
      there[call].in.push_back(each.device.data());
      truth[call].in.push_back(each.twin.data());
    }
  }
  gpu().sum_ranks(there, on());
  host().sum_ranks(truth, {});
  for (const Both& each : out) each.check_equal();
}

static void many_sums_of_both_table_sizes() {
  for (DType dtype : kAll)
    for (int calls : {5, 50})
      for (int inputs = 2; inputs <= 8; ++inputs)
        for (bool aligned : {true, false}) many_sums(dtype, calls, inputs, aligned);
  many_sums(DType::bf16, 10'000, 2, true);
}

// ---- rows

static void rows_of_all_lengths() {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (int64_t row_count : {1, 3, 4, 255, 784, 1023, 1024, 1028, 4096, 4097, 5000})
      for (int64_t phase : {0, 1}) {
        Both images = both(7 * row_count, DType::u8, phase), out = both(5 * row_count, dtype, phase);
        const std::vector<int64_t> index{6, 0, 3, 3, 1};
        DeviceMemory<int64_t> there(index);
        gpu().gather_rows({images.device.data(), 7, row_count, there.data(), 5, 0.31f, -1.5f, out.device.data(), dtype},
                          on());
        host().gather_rows({images.twin.data(), 7, row_count, index.data(), 5, 0.31f, -1.5f, out.twin.data(), dtype},
                           {});
        out.check_equal();
      }
}

static void rows_that_do_not_exist() {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (int64_t row_count : {7, 8}) {
      Both images = both(2 * row_count, DType::u8);
      DeviceMemory<int64_t> index({int64_t{-1}, int64_t{2}, int64_t{1} << 40});
      DeviceMemory<unsigned char> out(Bytes(static_cast<size_t>(3 * row_count) * itemsize(dtype)));
      for (int64_t rows_count : {2, 0}) {  // of no rows, none may be read
        gpu().gather_rows({images.device.data(), rows_count, row_count, index.data(), 3, 1.f, 0.f, out.data(), dtype},
                          on());
        std::vector<float> wide(static_cast<size_t>(3 * row_count));
        const Bytes made = out.values(stream);
        host().scale_cast({made.data(), dtype, wide.data(), DType::f32, 3 * row_count, 1.0}, {});
        for (float value : wide) CHECK(std::isnan(value));
      }
    }
}

// ---- norms

constexpr double kNormTolerance = 1e-13;  // relative: a thread adds up in about 44 bits

static double norm_of(const std::vector<Bytes>& arrays, DType dtype, DType out_dtype, bool aligned = false) {
  std::vector<Both> all;
  std::vector<Piece> pieces;
  for (const Bytes& bytes : arrays) all.emplace_back(bytes, dtype, aligned ? 0 : between(0, phases_of(dtype) - 1));
  for (Both& each : all)
    pieces.push_back({each.device.data(), 0, static_cast<int64_t>(each.twin.size() / itemsize(dtype))});
  const int64_t tiles = std::max<int64_t>(1, norm_tiles(pieces));
  auto partials = DeviceMemory<double>::unwritten(static_cast<size_t>(tiles + 1));
  const int64_t zero = 0;
  int64_t counter = 1;
  CUDA_OK(cudaMemcpy(partials.data() + tiles, &zero, sizeof zero, cudaMemcpyDefault));
  DeviceMemory<double> out(std::vector<double>(1));
  gpu().l2_norm({pieces, dtype, partials.data(), out.data(), out_dtype}, on());
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaMemcpy(&counter, partials.data() + tiles, sizeof counter, cudaMemcpyDefault));
  CHECK(counter == 0);  // as the next norm wants it
  if (out_dtype == DType::f64) return out.values(stream)[0];
  return as<float>(bytes_of(out.values(stream)))[0];
}

static double true_norm(const std::vector<Bytes>& arrays, DType dtype) {
  long double sum = 0;
  for (const Bytes& bytes : arrays) {
    const auto count = static_cast<int64_t>(bytes.size() / itemsize(dtype));
    std::vector<double> wide(static_cast<size_t>(count));
    host().scale_cast({bytes.data(), dtype, wide.data(), DType::f64, count, 1.0}, {});
    for (double value : wide) sum += static_cast<long double>(value) * value;
  }
  return static_cast<double>(std::sqrt(sum));
}

static void norms_of_all_shapes() {
  for (DType dtype : kFloating)
    for (const auto& [pieces, most] : {std::pair{1, 9}, {1, 70'000}, {3, 20'000}, {140, 300}, {1500, 40}}) {
      std::vector<Bytes> arrays;
      for (int i = 0; i < pieces; ++i)
        arrays.push_back(values_of(pieces == 1 ? most : i == 0 ? 8192 * 2 + 40 : between(1, most), dtype));
      const double truth = true_norm(arrays, dtype);
      CHECK(std::fabs(norm_of(arrays, dtype, DType::f64) - truth) <= kNormTolerance * truth);
      CHECK(std::fabs(norm_of(arrays, dtype, DType::f32) - truth) <= 1e-7 * truth);
      CHECK(norm_of(arrays, dtype, DType::f64, true) == norm_of(arrays, dtype, DType::f64, true));  // also at random
    }
}

// Squares that float32 cannot hold, alone and next to ones that it can.
static void norms_of_extreme_values() {
  for (DType dtype : kFloating)
    for (double value : {0.0, 1e-38, 1e-30, 1e-20, 6e-8, 65504.0, 1e18, 1e19, 1e30, 3e38, HUGE_VAL, std::nan("")})
      for (bool alone : {true, false}) {
        std::vector<double> wide(9000, alone ? value : 1.0);
        wide[4321] = value;
        Bytes bytes(wide.size() * itemsize(dtype));
        host().scale_cast({wide.data(), DType::f64, bytes.data(), dtype, 9000, 1.0}, {});
        std::vector<Bytes> arrays(alone && value > 0 ? 140 : 1, bytes);  // tables of both sizes
        for (size_t i = 1; i < arrays.size(); ++i) arrays[i].resize(100 * itemsize(dtype));
        const double made = norm_of(arrays, dtype, DType::f64), truth = true_norm(arrays, dtype);
        CHECK(made == truth || std::fabs(made - truth) <= kNormTolerance * truth ||
              (std::isnan(made) && std::isnan(truth)));
      }
}

// ---- optimizers

// Segments of every kind over `count` elements: with gaps and without, empty, inactive, of groups that do not exist.
static std::vector<int64_t> segments_of(int64_t count, int64_t segments) {
  std::vector<int64_t> rows;
  int64_t begin = 0;
  for (int64_t i = 0; i < segments && begin < count; ++i) {
    if (i % 3 == 1) begin = std::min(count, begin + between(0, 20));
    const int64_t most = std::min(count - begin, 2 * count / segments + 1);
    const int64_t length = i % 11 == 5 ? 0 : i + 1 == segments ? count - begin : between(0, most);
    const int64_t group = i % 7 == 3 ? 2 : i % 13 == 6 ? -1 : i % 2;
    rows.insert(rows.end(), {begin, length, group, i % 4 == 0 ? 0 : between(1, 1000), i % 5 != 4});
    begin += length;
  }
  return rows;
}

struct FlatCase {
  DType dtype;
  int64_t count, segments;
  bool aligned = true, scaled = true, with_momentum = true;
};

class FlatRun {
 public:
  explicit FlatRun(const FlatCase& shape, const std::vector<double>& group_rows)
      : shape_(shape),
        segments_(segments_of(shape.count, shape.segments)),
        groups_(group_rows),
        segments_there_(segments_),
        groups_there_(group_rows),
        clip_there_(clip_),
        found_inf_there_(found_inf_),
        constants_(DeviceMemory<double>::unwritten(segments_.size() / 5 * kOptimizerConstants)) {
    const int64_t phase = between(0, phases_of(shape.dtype) - 1);
    for (int i = 0; i < 5; ++i)
      buffers_.push_back(both(shape.count, shape.dtype, shape.aligned ? phase : (phase + i) % phases_of(shape.dtype)));
    for (int i : {3, 4}) buffers_[i] = Both(numbers(shape.count, shape.dtype, i), shape.dtype, 0);  // not negative
  }

  FlatBuffer there() {
    return flat(buffers_[0].device.data(), buffers_[1].device.data(), segments_there_.data(), groups_there_.data(),
                clip_there_.data(), found_inf_there_.data());
  }
  FlatBuffer truth() {
    return flat(buffers_[0].twin.data(), buffers_[1].twin.data(), segments_.data(), groups_.data(), clip_.data(),
                found_inf_.data());
  }
  void* device(int i) { return buffers_[i].device.data(); }
  void* twin(int i) { return buffers_[i].twin.data(); }

  void check_equal() {
    for (const Both& each : buffers_) each.check_equal();
    CHECK(segments_there_.values(stream) == segments_);
  }
  void check_close() {
    for (const Both& each : buffers_) each.check_close(shape_.dtype);
    CHECK(segments_there_.values(stream) == segments_);
  }

 private:
  FlatBuffer flat(void* parameters, const void* gradients, int64_t* segments, double* groups, double* clip,
                  float* found_inf) {
    return {parameters,
            gradients,
            shape_.count,
            shape_.dtype,
            segments,
            static_cast<int64_t>(segments_.size() / 5),
            constants_.data(),
            groups,
            2,
            shape_.scaled ? clip : nullptr,
            shape_.scaled ? found_inf : nullptr};
  }

  FlatCase shape_;
  std::vector<int64_t> segments_;
  std::vector<double> groups_;
  std::vector<double> clip_{0.125};
  std::vector<float> found_inf_{0.0f};
  DeviceMemory<int64_t> segments_there_;
  DeviceMemory<double> groups_there_;
  DeviceMemory<double> clip_there_;
  DeviceMemory<float> found_inf_there_;
  DeviceMemory<double> constants_;
  std::vector<Both> buffers_;  // parameters, gradients, and the state: momentum or averages, squares, their maxima
};

static void sgd_once(const FlatCase& shape) {
  const double keep = shape.with_momentum ? 0.5 : 0;
  FlatRun run(shape, {0.5, keep, 0.25, 0.125, shape.with_momentum ? 1.0 : 0.0, 0, 0.25, 0, 0, 0, 0, 1});
  gpu().sgd({run.there(), shape.with_momentum ? run.device(2) : nullptr}, on());
  host().sgd({run.truth(), shape.with_momentum ? run.twin(2) : nullptr}, {});
  run.check_equal();
}

static void adam_once(const FlatCase& shape, bool amsgrad, bool decoupled) {
  FlatRun run(shape, {0.5, 0.9, 0.999, 0.25, 0.125, 0, 0.25, 0.0, 0.75, 0.5, 0, 1});
  gpu().adam({run.there(), run.device(2), run.device(3), amsgrad ? run.device(4) : nullptr, decoupled}, on());
  host().adam({run.truth(), run.twin(2), run.twin(3), amsgrad ? run.twin(4) : nullptr, decoupled}, {});
  run.check_close();
}

static void lion_once(const FlatCase& shape) {
  FlatRun run(shape, {0.5, 0.5, 0.75, 0.25, 0, 0, 0.25, 0.5, 0.5, 0, 1, 0});
  gpu().lion({run.there(), run.device(2)}, on());
  host().lion({run.truth(), run.twin(2)}, {});
  run.check_equal();
}

static void optimizers_of_all_shapes() {
  for (DType dtype : kFloating) {
    for (int64_t count : {1, 7, 33, 4095, 4096, 4097, 12'289})
      for (int64_t segments : {1, 9, 300})
        for (bool aligned : {true, false}) {
          const FlatCase shape{dtype, count, segments, aligned, segments != 9, segments != 300};
          sgd_once(shape);
          adam_once(shape, aligned, segments == 9);
          lion_once(shape);
        }
    sgd_once({dtype, 20'000, 5000});
    adam_once({dtype, 20'000, 5000}, true, true);
    lion_once({dtype, 20'000, 5000});
  }
  sgd_once({DType::f32, 4 * 1024 * 1024 + 16'400, 40});  // the longer tiles
  adam_once({DType::bf16, 4 * 1024 * 1024 + 5, 40}, false, true);
}

int main() {
  return run_all({{"roundings", roundings},
                  {"every half widens", every_half_widens},
                  {"casts at all phases", casts_at_all_phases},
                  {"copies at all distances", copies_at_all_distances},
                  {"packs of both table sizes", packs_of_both_table_sizes},
                  {"ten thousand pieces", ten_thousand_pieces},
                  {"sums of all shapes", sums_of_all_shapes},
                  {"many sums of both table sizes", many_sums_of_both_table_sizes},
                  {"rows of all lengths", rows_of_all_lengths},
                  {"rows that do not exist", rows_that_do_not_exist},
                  {"norms of all shapes", norms_of_all_shapes},
                  {"norms of extreme values", norms_of_extreme_values},
                  {"optimizers of all shapes", optimizers_of_all_shapes}});
}
