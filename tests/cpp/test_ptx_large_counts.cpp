// Counts beyond 2^31 elements and 2^32 bytes: the kernels' PTX over sparse memory, of which only the blocks run that
// lie at the beginning, around these numbers, and at the end.  Needs MGPU_TEST_PTX, because a host would run all
// blocks.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "backends/cuda/launch_plan.h"
#include "kernel_tests.h"

constexpr int64_t kGi = int64_t{1} << 30;

// Zeros that take no memory until they are written; on a multiple of 4096 bytes.
class Sparse {
 public:
  Sparse(int64_t count, DType dtype) : nbytes_(static_cast<size_t>(count) * itemsize(dtype)), dtype_(dtype) {
    memory_ = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory_ != MAP_FAILED);
  }
  ~Sparse() { munmap(memory_, nbytes_); }
  Sparse(const Sparse&) = delete;

  void* data() { return memory_; }
  void* at(int64_t element) { return static_cast<char*>(memory_) + element * static_cast<int64_t>(itemsize(dtype_)); }
  void write(int64_t begin, int64_t count) {
    const Bytes values = numbers(count, dtype_, static_cast<int>(begin % 11));
    std::memcpy(at(begin), values.data(), values.size());
  }

 private:
  void* memory_;
  size_t nbytes_;
  DType dtype_;
};

struct Window {
  int64_t begin, count;
};

// Lets the next launches run the blocks around 0, 2^31 and 2^32 elements and the end; returns what they cover.
static std::vector<Window> run_around(int64_t count, int64_t tile) {
  const int64_t last = (count - 1) / tile;
  std::vector<uint32_t> blocks;
  for (int64_t element : {int64_t{0}, 2 * kGi, 4 * kGi, count - 1})
    for (int64_t block = element / tile - 1; block <= element / tile + 1; ++block)
      if (block >= 0 && block <= last) blocks.push_back(static_cast<uint32_t>(block));
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  ptx::run_only(blocks);
  std::vector<Window> windows;
  for (uint32_t block : blocks) windows.push_back({block * tile, std::min(tile, count - block * tile)});
  return windows;
}

static void check_same(const void* made, const Bytes& expected) {
  CHECK(std::memcmp(made, expected.data(), expected.size()) == 0);
}

static void casts(DType from, DType to, int64_t phase) {
  const int64_t count = 3 * kGi + 12'345, size = static_cast<int64_t>(itemsize(to));
  Sparse in(count + phase, from), out(count, to);
  // Whole vectors where both arrays are aligned; otherwise element by element.
  const int width = phase ? 1 : cuda::vector_width(static_cast<int>(itemsize(from)), static_cast<int>(size));
  const auto windows = run_around(count, int64_t{cuda::kTileVectors} * width);
  for (const Window& each : windows) in.write(each.begin + phase, each.count);
  in.write(count + phase - 40, 40);  // the tail, which block 0 does
  gpu().scale_cast({in.at(phase), from, out.data(), to, count, 0.5}, on());
  const auto check = [&](int64_t begin, int64_t length) {
    Bytes expected(static_cast<size_t>(length * size));
    host().scale_cast({in.at(begin + phase), from, expected.data(), to, length, 0.5}, {});
    check_same(out.at(begin), expected);
  };
  for (const Window& each : windows) check(each.begin, each.count);
  check(count - count % width, count % width);
}

static void casts_of_many() {
  casts(DType::f32, DType::bf16, 0);
  casts(DType::f16, DType::f32, 1);
}

static void copies_of_many() {
  const int64_t count = 6 * kGi + 99;
  for (int64_t distance : {0, 1}) {
    Sparse in(count + distance, DType::u8), out(count, DType::u8);
    const auto windows = run_around(count, int64_t{cuda::kTileVectors} * (distance ? 1 : 16));
    for (const Window& each : windows) in.write(each.begin + distance, each.count);
    gpu().pack({{{in.at(distance), 0, count}}, DType::u8, out.data(), DType::u8, 1}, on());
    for (const Window& each : windows)
      CHECK(std::memcmp(out.at(each.begin), in.at(each.begin + distance), static_cast<size_t>(each.count)) == 0);
  }
}

static void sums_of_many() {
  for (DType dtype : {DType::bf16, DType::u8}) {
    const int64_t count = (dtype == DType::u8 ? 6 : 3) * kGi + 77;
    Sparse one(count, dtype), other(count, dtype), out(count, dtype);
    const int64_t tile = cuda::kTileVectors * 16 / static_cast<int64_t>(itemsize(dtype));
    const auto windows = run_around(count, tile);
    for (const Window& each : windows) {
      one.write(each.begin, each.count);
      other.write(each.begin, each.count);
    }
    gpu().sum_ranks({{{one.data(), other.data()}, {out.data()}, count, dtype, ReduceOp::sum, 1}}, on());
    for (const Window& each : windows) {
      Bytes expected(static_cast<size_t>(each.count) * itemsize(dtype));
      const void *left = one.at(each.begin), *right = other.at(each.begin);
      host().sum_ranks({{{left, right}, {expected.data()}, each.count, dtype, ReduceOp::sum, 1}}, {});
      check_same(out.at(each.begin), expected);
    }
  }
}

static void rows_of_many() {
  const int64_t row_count = 5000, rows = kGi / 1000, batch = 500'000;
  Sparse table(row_count * rows, DType::u8), out(row_count * batch, DType::f32);
  std::vector<int64_t> index(static_cast<size_t>(batch));
  for (int64_t i = 0; i < batch; ++i) index[static_cast<size_t>(i)] = (i * 7919) % rows;
  index.back() = rows - 1;
  const int64_t tiles = (row_count + cuda::row_tile(4) - 1) / cuda::row_tile(4);
  const std::vector<int64_t> wanted{0, 1, batch / 2, batch - 1};
  std::vector<uint32_t> blocks;
  for (int64_t row : wanted) {
    for (int64_t tile = 0; tile < tiles; ++tile) blocks.push_back(static_cast<uint32_t>(row * tiles + tile));
    table.write(index[static_cast<size_t>(row)] * row_count, row_count);
  }
  ptx::run_only(blocks);
  const auto* rows_of_table = static_cast<const uint8_t*>(table.data());
  gpu().gather_rows({rows_of_table, rows, row_count, index.data(), batch, 0.5f, 1.f, out.data(), DType::f32}, on());
  for (int64_t row : wanted) {
    Bytes expected(static_cast<size_t>(row_count) * sizeof(float));
    host().gather_rows(
        {rows_of_table, rows, row_count, &index[static_cast<size_t>(row)], 1, 0.5f, 1.f, expected.data(), DType::f32},
        {});
    check_same(out.at(row * row_count), expected);
  }
}

static void norm_of_many() {
  const int64_t count = 2 * kGi + 3 * kNormTile + 17;
  Sparse in(count, DType::f32);
  const int64_t tiles = (count + kNormTile - 1) / kNormTile;
  std::vector<double> partials(static_cast<size_t>(tiles + 1));
  const auto windows = run_around(count, kNormTile);
  const int64_t others = tiles - static_cast<int64_t>(windows.size());  // as if they had been counted
  std::memcpy(&partials.back(), &others, sizeof others);
  double truth = 0, made = 0;
  for (const Window& each : windows) {
    in.write(each.begin, each.count);
    const auto* values = static_cast<const float*>(in.at(each.begin));
    for (int64_t i = 0; i < each.count; ++i) truth += double{values[i]} * values[i];
  }
  gpu().l2_norm({{{in.data(), 0, count}}, DType::f32, partials.data(), &made, DType::f64}, on());
  CHECK(made == std::sqrt(truth));  // whole numbers: exact in any order
}

// A segment of its own before 2^31, across it, and behind it.
static void optimizers_of_many() {
  const int64_t count = 2 * kGi + 100'000, half = 2 * kGi;
  const std::vector<int64_t> rows{0,          100, 0, 0, 1, 100,        half - 200,         0, 3, 1,
                                  half - 100, 200, 1, 4, 1, half + 100, count - half - 100, 1, 7, 1};
  const std::vector<double> groups{0.5, 0.5, 0.25, 0.125, 0, 0, 0.25, 0.5, 0, 0, 1, 0};
  Sparse parameters(count, DType::bf16), gradients(count, DType::bf16), momentum(count, DType::bf16);
  std::vector<double> constants(4 * kOptimizerConstants);
  std::vector<int64_t> there = rows;
  const auto windows = run_around(count, cuda::kFlatTile);
  std::vector<std::vector<Bytes>> expected;
  for (const Window& each : windows) {
    std::vector<Bytes> copies;
    for (Sparse* buffer : {&parameters, &gradients, &momentum}) {
      buffer->write(each.begin, each.count);
      const auto* begin = static_cast<const unsigned char*>(buffer->at(each.begin));
      copies.emplace_back(begin, begin + each.count * 2);
    }
    std::vector<int64_t> inside;  // the segments, as far as they lie in the window
    for (size_t row = 0; row < rows.size(); row += 5) {
      const int64_t begin = std::max(rows[row], each.begin);
      const int64_t end = std::min(rows[row] + rows[row + 1], each.begin + each.count);
      if (end > begin)
        inside.insert(inside.end(), {begin - each.begin, end - begin, rows[row + 2], rows[row + 3], rows[row + 4]});
    }
    host().sgd({{copies[0].data(), copies[1].data(), each.count, DType::bf16, inside.data(),
                 static_cast<int64_t>(inside.size() / 5), nullptr, groups.data(), 2, nullptr, nullptr, nullptr},
                copies[2].data()},
               {});
    expected.push_back(std::move(copies));
  }
  gpu().sgd({{parameters.data(), gradients.data(), count, DType::bf16, there.data(), 4, constants.data(), groups.data(),
              2, nullptr, nullptr, nullptr},
             momentum.data()},
            on());
  for (size_t i = 0; i < windows.size(); ++i) {
    check_same(parameters.at(windows[i].begin), expected[i][0]);
    check_same(momentum.at(windows[i].begin), expected[i][2]);
  }
}

int main() {
  setenv("FAKE_CUDA_DEVICES", "1", 1);  // a machine on which memory that it does not know may be used
  if (!ptx::is_wanted()) {
    std::printf("skipped: needs MGPU_TEST_PTX\n");
    return 0;
  }
  return run_all({{"casts", casts_of_many},
                  {"copies", copies_of_many},
                  {"sums", sums_of_many},
                  {"rows", rows_of_many},
                  {"norm", norm_of_many},
                  {"optimizers", optimizers_of_many}},
                 false);
}
