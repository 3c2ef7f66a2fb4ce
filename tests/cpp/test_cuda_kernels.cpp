// Every kernel of the CUDA backend against the CPU backend, on small whole numbers: dtypes, counts around the widths of
// vectors and tiles, misaligned memory, none at all.  Compiled twice: with the fake runtime, and, where there is a GPU,
// with the real one (the program then also runs under compute-sanitizer).
#include <cmath>

#include "kernel_tests.h"

static void casts() {
  for (DType from : kFloating)
    for (DType to : kFloating)
      for (int64_t count : kCounts)
        for (int64_t offset : {0, 1, 4}) {
          Both in(count, from, 0, offset), out(count, to, 5, 0);
          for (double scale : {1.0, -0.5}) {
            gpu().scale_cast({in.device.data(), from, out.device.data(), to, count, scale}, on());
            host().scale_cast({in.twin.data(), from, out.twin.data(), to, count, scale}, {});
            out.check_equal();
          }
        }
}

static Packing packing(std::vector<Both>& pieces, const std::vector<int64_t>& counts, bool twin) {
  Packing call{{}, DType::f32, nullptr, DType::f32, 1.0};
  int64_t begin = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    call.pieces.push_back({twin ? pieces[i].twin.data() : pieces[i].device.data(), begin, counts[i]});
    begin += counts[i];
  }
  return call;
}

// `pieces` arrays of different sizes and alignments into one and back; many enough for several launches.
static void packs(int pieces, DType dtype, DType flat_dtype, double scale) {
  std::vector<int64_t> counts;
  std::vector<Both> arrays;
  int64_t total = 0;
  for (int i = 0; i < pieces; ++i) {
    counts.push_back(1 + (i * 37) % (pieces > 100 ? 23 : 6000));
    arrays.emplace_back(counts.back(), dtype, i, i % 3);
    total += counts.back();
  }
  Both flat(total, flat_dtype, 3, 1);
  Packing there = packing(arrays, counts, false), truth = packing(arrays, counts, true);
  for (Packing* call : {&there, &truth}) {
    call->dtype = dtype;
    call->flat_dtype = flat_dtype;
    call->scale = scale;
  }
  there.flat = flat.device.data();
  truth.flat = flat.twin.data();
  gpu().pack(there, on());
  host().pack(truth, {});
  flat.check_equal();
  there.scale = truth.scale = scale * 2;
  gpu().unpack(there, on());
  host().unpack(truth, {});
  for (const Both& array : arrays) array.check_equal();
}

static void all_packs() {
  for (DType dtype : kFloating)
    for (DType flat_dtype : {DType::f16, DType::f32, DType::f64}) packs(9, dtype, flat_dtype, 0.5);
  packs(1, DType::f32, DType::f32, 0.5);
  for (int pieces : {128, 129, 960, 961, 2500}) packs(pieces, DType::f32, DType::bf16, 0.5);
  gpu().pack({{}, DType::f32, nullptr, DType::f32, 1.0}, on());  // nothing to do
}

static void copies_of_bytes() {
  for (DType dtype : kAll)
    for (int64_t to : {0, 1})
      for (int64_t from : {0, 1, 3}) {
        Both one(4099, dtype, 1, from), two(70'001, dtype, 2, to), flat(4099 + 70'001, dtype, 7, to);
        Packing there{
            {{one.device.data(), 0, 4099}, {two.device.data(), 4099, 70'001}}, dtype, flat.device.data(), dtype, 1.0};
        Packing truth{
            {{one.twin.data(), 0, 4099}, {two.twin.data(), 4099, 70'001}}, dtype, flat.twin.data(), dtype, 1.0};
        gpu().pack(there, on());
        host().pack(truth, {});
        flat.check_equal();
      }
}

static void sums() {
  for (DType dtype : kAll)
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max})
      for (int ranks : {1, 2, 3, 8})
        for (int64_t count : {int64_t{5}, int64_t{16}, int64_t{4099}})
          for (int64_t offset : {0, 1}) {
            std::vector<Both> in;
            for (int rank = 0; rank < ranks; ++rank) in.emplace_back(count, dtype, 5 * rank, rank == 1 ? offset : 0);
            Both out(count, dtype, 9);
            SumRanks there{{}, {out.device.data(), in[0].device.data()}, count, dtype,
                           op, op == ReduceOp::avg ? ranks : 1};
            SumRanks truth = there;
            truth.out = {out.twin.data(), in[0].twin.data()};
            for (Both& each : in) {
              there.in.push_back(each.device.data());
              truth.in.push_back(each.twin.data());
            }
            gpu().sum_ranks({there}, on());
            host().sum_ranks({truth}, {});
            out.check_equal();
            in[0].check_equal();
          }
}

// Sums in one call: of several lengths, none among them, misaligned ones, in place, and the dtype that changes on the
// way.
static void many_sums(int count, int ranks, const std::vector<DType>& dtypes) {
  std::vector<std::vector<Both>> in(static_cast<size_t>(count));
  std::vector<Both> out;
  std::vector<SumRanks> there, truth;
  for (int i = 0; i < count; ++i) {
    const DType dtype = dtypes[static_cast<size_t>(i) * dtypes.size() / static_cast<size_t>(count)];
    const int64_t length = i % 5 == 4 ? 0 : 1 + i * 37 % 300 + (i == 1 ? 20'000 : 0);
    for (int rank = 0; rank < ranks; ++rank) in[i].emplace_back(length, dtype, 5 * rank + i, (i + rank / 2) % 3);
    out.emplace_back(length, dtype, 9, i % 3);
    const bool in_place = i % 7 == 3;
    there.push_back({{}, {in_place ? in[i][0].device.data() : out[i].device.data()}, length, dtype, ReduceOp::sum, 1});
    truth.push_back({{}, {in_place ? in[i][0].twin.data() : out[i].twin.data()}, length, dtype, ReduceOp::sum, 1});
    for (Both& each : in[i]) {
      there[i].in.push_back(each.device.data());
      truth[i].in.push_back(each.twin.data());
    }
  }
  gpu().sum_ranks(there, on());
  host().sum_ranks(truth, {});
  for (int i = 0; i < count; ++i) {
    out[i].check_equal();
    in[i][0].check_equal();
  }
}

static void all_many_sums() {
  for (DType dtype : kAll)
    for (int ranks : {1, 2, 3, 8, 9}) many_sums(11, ranks, {dtype});
  for (int count : {40, 41, 340, 341, 700}) many_sums(count, 2, {DType::f32});
  many_sums(30, 2, {DType::f32, DType::bf16, DType::f64});
  many_sums(1200, 1, {DType::bf16});
}

static void rows() {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32})
    for (int64_t row_count : {1, 784, 1024, 2500}) {
      Both images(7 * row_count, DType::u8, 3), out(5 * row_count, dtype, 1);
      const std::vector<int64_t> index{6, 0, 3, 3, 1};
      DeviceMemory<int64_t> there(index);
      gpu().gather_rows({images.device.data(), 7, row_count, there.data(), 5, 0.31f, -1.5f, out.device.data(), dtype},
                        on());
      host().gather_rows({images.twin.data(), 7, row_count, index.data(), 5, 0.31f, -1.5f, out.twin.data(), dtype}, {});
      out.check_equal();
    }
  Both images(20, DType::u8), out(20, DType::f32);
  DeviceMemory<int64_t> wrong({int64_t{-1}, int64_t{2}});
  gpu().gather_rows({images.device.data(), 2, 10, wrong.data(), 2, 1.f, 0.f, out.device.data(), DType::f32}, on());
  const Bytes made = out.device.values(stream);
  for (int i = 0; i < 20; ++i) {
    float value;
    std::memcpy(&value, made.data() + i * sizeof value, sizeof value);
    CHECK(std::isnan(value));  // a row that is not there
  }
}

static void norms() {
  for (DType dtype : kFloating) {
    std::vector<Both> arrays;
    std::vector<Piece> there, truth;
    for (int64_t count : {1, 31, 4097, 70'000}) {
      arrays.emplace_back(count, dtype, 3, count % 3);
      there.push_back({nullptr, 0, count});
    }
    truth = there;
    for (size_t i = 0; i < arrays.size(); ++i) {
      there[i].pointer = arrays[i].device.data();
      truth[i].pointer = arrays[i].twin.data();
    }
    const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
    Both partials(Bytes(8 * static_cast<size_t>(norm_tiles(there) + 1)), DType::f64), out(1, wide);
    gpu().l2_norm({there, dtype, reinterpret_cast<double*>(partials.device.data()), out.device.data(), wide}, on());
    host().l2_norm({truth, dtype, reinterpret_cast<double*>(partials.twin.data()), out.twin.data(), wide}, {});
    out.check_equal();  // whole numbers: exact in any order
  }
}

// Flat parameters on both sides, in segments with gaps, of two groups, one of them inactive.
struct Flat {
  static constexpr int64_t kCount = 9000;
  Flat(DType dtype, int64_t offset, const std::vector<double>& group_rows)
      : parameters(kCount, dtype, 1, offset),
        gradients(kCount, dtype, 2, offset),
        one(kCount, dtype, 0, offset),
        two(kCount, dtype, 0, offset),
        three(kCount, dtype, 0, offset),
        segments(rows),
        groups(group_rows),
        clip({0.125}),
        found_inf({0.0f}),
        segments_there(rows),
        groups_there(group_rows),
        clip_there(clip),
        found_inf_there(found_inf),
        constants(std::vector<double>(5 * kOptimizerConstants)),
        dtype(dtype) {}

  FlatBuffer there() {
    return {parameters.device.data(),
            gradients.device.data(),
            kCount,
            dtype,
            segments_there.data(),
            5,
            constants.data(),
            groups_there.data(),
            2,
            clip_there.data(),
            found_inf_there.data()};
  }
  FlatBuffer truth() {
    return {parameters.twin.data(),
            gradients.twin.data(),
            kCount,
            dtype,
            segments.data(),
            5,
            nullptr,
            groups.data(),
            2,
            &clip[0],
            &found_inf[0]};
  }
  void check_equal() {
    for (const Both* each : {&parameters, &gradients, &one, &two, &three}) each->check_equal();
    CHECK(segments_there.values(stream) == segments);
  }
  void check_close() {
    for (const Both* each : {&parameters, &gradients, &one, &two, &three}) each->check_close(dtype);
    CHECK(segments_there.values(stream) == segments);
  }

  const std::vector<int64_t> rows{0, 5, 0,    0,  1, 8, 4000, 1,    7,    1, 4008, 1, 0,
                                  0, 1, 4009, 91, 1, 2, 0,    4100, 4900, 0, 0,    1};
  Both parameters, gradients, one, two, three;
  std::vector<int64_t> segments;
  std::vector<double> groups, clip;
  std::vector<float> found_inf;
  DeviceMemory<int64_t> segments_there;
  DeviceMemory<double> groups_there, clip_there;
  DeviceMemory<float> found_inf_there;
  DeviceMemory<double> constants;
  DType dtype;
};

static void optimizers() {
  for (DType dtype : kFloating)
    for (int64_t offset : {0, 1}) {
      Flat flat(dtype, offset, {0.5, 0, 0, 0, 0, 0, 0.25, 0.5, 0.5, 0.125, 1, 1});
      for (int step = 0; step < 3; ++step) {
        gpu().sgd({flat.there(), flat.one.device.data()}, on());
        host().sgd({flat.truth(), flat.one.twin.data()}, {});
        flat.check_equal();
      }
      for (bool decoupled : {false, true})
        for (bool amsgrad : {false, true}) {
          Flat adam(dtype, offset, {0.5, 0.9, 0.999, 1e-8, 0.125, 0, 0.25, 0.5, 0.75, 1e-6, 0, 1});
          for (int step = 0; step < 3; ++step) {
            gpu().adam({adam.there(), adam.one.device.data(), adam.two.device.data(),
                        amsgrad ? adam.three.device.data() : nullptr, decoupled},
                       on());
            host().adam({adam.truth(), adam.one.twin.data(), adam.two.twin.data(),
                         amsgrad ? adam.three.twin.data() : nullptr, decoupled},
                        {});
          }
          adam.check_close();
        }
      Flat lion(dtype, offset, {0.5, 0.5, 0.75, 0, 0, 0, 0.25, 0.5, 0.5, 0.5, 1, 0});
      for (int step = 0; step < 3; ++step) {
        gpu().lion({lion.there(), lion.one.device.data()}, on());
        host().lion({lion.truth(), lion.one.twin.data()}, {});
        lion.check_equal();
      }
    }
}

// The gradients of a Flat's active segments, each in memory of its own, every other one some elements after an aligned
// address; and the table with their addresses.
struct OwnGradients {
  OwnGradients(const Flat& flat, int64_t offset) {
    const size_t size = itemsize(flat.dtype);
    std::vector<const void*> addresses;
    for (size_t row = 0; row < 5; ++row) {
      const auto begin = flat.gradients.twin.begin() + flat.rows[5 * row] * static_cast<int64_t>(size);
      const Bytes bytes(begin, begin + flat.rows[5 * row + 1] * static_cast<int64_t>(size));
      memory.emplace_back(bytes, row % 2 ? offset * static_cast<int64_t>(size) : 0);
      addresses.push_back(flat.rows[5 * row + 4] ? memory.back().data() : nullptr);
    }
    table.emplace_back(addresses);
  }
  FlatBuffer of(Flat& flat) {
    FlatBuffer buffer = flat.there();
    buffer.gradients = nullptr;
    buffer.gradient_of = table[0].data();
    return buffer;
  }
  std::vector<DeviceMemory<unsigned char>> memory;
  std::vector<DeviceMemory<const void*>> table;
};

static void gradients_in_memory_of_their_own() {
  for (DType dtype : kFloating)
    for (int64_t offset : {0, 1})
      for (int64_t own_offset : {0, 1, 3}) {
        Flat sgd(dtype, offset, {0.5, 0, 0, 0, 0, 0, 0.25, 0.5, 0.5, 0.125, 1, 1});
        OwnGradients gradients(sgd, own_offset);
        Flat adam(dtype, offset, {0.5, 0.9, 0.999, 1e-8, 0.125, 0, 0.25, 0.5, 0.75, 1e-6, 0, 1});
        Flat lion(dtype, offset, {0.5, 0.5, 0.75, 0, 0, 0, 0.25, 0.5, 0.5, 0.5, 1, 0});
        for (int step = 0; step < 2; ++step) {
          gpu().sgd({gradients.of(sgd), sgd.one.device.data()}, on());
          host().sgd({sgd.truth(), sgd.one.twin.data()}, {});
          gpu().adam({gradients.of(adam), adam.one.device.data(), adam.two.device.data(), nullptr, true}, on());
          host().adam({adam.truth(), adam.one.twin.data(), adam.two.twin.data(), nullptr, true}, {});
          gpu().lion({gradients.of(lion), lion.one.device.data()}, on());
          host().lion({lion.truth(), lion.one.twin.data()}, {});
        }
        sgd.check_equal();
        adam.check_close();
        lion.check_equal();
      }
}

static void an_overflow_changes_nothing() {
  Flat flat(DType::f32, 0, {0.5, 0, 0, 0, 0, 0, 0.25, 0.5, 0.5, 0.125, 1, 1});
  const float yes = 1;
  CUDA_OK(cudaMemcpy(flat.found_inf_there.data(), &yes, sizeof yes, cudaMemcpyDefault));
  CUDA_OK(cudaStreamSynchronize(nullptr));
  gpu().sgd({flat.there(), flat.one.device.data()}, on());
  flat.check_equal();
}

static void refusals() {
  Both memory(16, DType::f32);
  std::vector<float> ordinary(16);
  CHECK_THROWS(InvalidArgument, "a tensor: the memory must be of device 0, and is ordinary host memory",
               (cuda::check_memory(ordinary.data(), 0, "a tensor"), 0));
  std::vector<const void*> many(65, memory.device.data());
  CHECK_THROWS(InvalidArgument, "combines up to 64 arrays, not 65",
               (gpu().sum_ranks({{many, {memory.device.data()}, 4, DType::f32, ReduceOp::sum, 1}}, on()), 0));
  CUDA_OK(cudaGetLastError());  // nothing is left behind
  memory.check_equal();
}

// Throws before anything is written: the memory of one byte would not do.
void dtypes_that_a_kernel_lacks(DeviceOps& ops, Stream on) {
  unsigned char byte = 7;
  const int64_t index = 0;
  int64_t segment[kSegmentColumns] = {0, 1, 0, 0, 1};
  const double groups[6] = {};
  const FlatBuffer flat{&byte, &byte, 1, DType::u8, segment, 1, nullptr, groups, 1, nullptr, nullptr};
  CHECK_THROWS(InvalidArgument, "does not work on int32",
               ops.pack({{{&byte, 0, 1}}, DType::i32, &byte, DType::f32, 1.0}, on));
  CHECK_THROWS(InvalidArgument, "does not work on int64",
               ops.unpack({{{&byte, 0, 1}}, DType::f32, &byte, DType::i64, 2.0}, on));
  CHECK_THROWS(InvalidArgument, "does not work on uint8",
               ops.scale_cast({&byte, DType::f32, &byte, DType::u8, 1, 1.0}, on));
  CHECK_THROWS(InvalidArgument, "gather_rows does not work on float64",
               ops.gather_rows({&byte, 1, 1, &index, 1, 1.0F, 0.0F, &byte, DType::f64}, on));
  CHECK_THROWS(InvalidArgument, "gather_rows does not work on int32",
               ops.gather_rows({&byte, 1, 1, &index, 1, 1.0F, 0.0F, &byte, DType::i32}, on));
  CHECK_THROWS(InvalidArgument, "l2_norm does not work on int32",
               ops.l2_norm({{}, DType::i32, nullptr, &byte, DType::f32}, on));
  CHECK_THROWS(InvalidArgument, "the result of l2_norm does not work on float16",
               ops.l2_norm({{}, DType::f32, nullptr, &byte, DType::f16}, on));
  CHECK_THROWS(InvalidArgument, "an optimizer does not work on uint8", ops.lion({flat, &byte}, on));
  CHECK_THROWS(InvalidArgument, "sum_ranks does not work on dtype number 77",
               ops.sum_ranks({{{&byte, &byte}, {&byte}, 1, static_cast<DType>(77), ReduceOp::sum, 1}}, on));
  CHECK(byte == 7);
}
void refused_dtypes() {
  dtypes_that_a_kernel_lacks(host(), {});
  dtypes_that_a_kernel_lacks(gpu(), on());
}

int main() {
  return run_all({{"casts", casts},
                  {"packs", all_packs},
                  {"copies", copies_of_bytes},
                  {"sums", sums},
                  {"many sums", all_many_sums},
                  {"rows", rows},
                  {"norms", norms},
                  {"optimizers", optimizers},
                  {"gradients in memory of their own", gradients_in_memory_of_their_own},
                  {"overflow", an_overflow_changes_nothing},
                  {"refusals", refusals},
                  {"refused dtypes", refused_dtypes}});
}
