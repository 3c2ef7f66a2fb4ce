// Variants of the kernels, side by side in one process: those that ship, those they were, and those they might be.
//
//   kernel_variants [ROUNDS]
//
// First each must make the bits of the first of its kind, on small arrays; then, on a GPU, each is timed on large ones:
// in turns, behind a memset that flushes the L2 cache and keeps the device busy while the host launches, between two
// events.  A line of JSON for each: median and 90th percentile in microseconds, GB/s of what it has to move, and its
// speed as a part of a device-to-device copy's of as many bytes.  Exit status 1: other bits.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/kernels/tables.cuh"
#include "backends/cuda/launch.h"
#include "benchmarks/ladder/variants/before.cuh"
#include "benchmarks/ladder/variants/optimizers.cuh"
#include "core/types.h"
#ifdef MGPU_FAKE_CUDA
#include "fakes/cuda/fake_cuda.h"
#include "ptx_faults.h"
#endif

namespace {

using namespace mgpu;
using namespace mgpu::cuda;

cudaStream_t stream;

void ok(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
  std::exit(2);
}
#define OK(call) ok(call, #call)

int multiprocessors() {
  int count = 4;
#ifndef MGPU_FAKE_CUDA
  OK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
#endif
  return count;
}

// Memory of the device with its first contents, to which it can be set back.
class Array {
 public:
  explicit Array(std::vector<unsigned char> contents, int64_t nbytes = 0)
      : contents_(std::move(contents)), nbytes_(nbytes ? nbytes : static_cast<int64_t>(contents_.size())) {
    OK(cudaMalloc(&memory_, static_cast<size_t>(std::max<int64_t>(nbytes_, 16))));
    reset();
  }
  ~Array() { cudaFree(memory_); }
  Array(const Array&) = delete;

  // Contents that are shorter than the memory are repeated.
  void reset() const {
    const auto length = static_cast<int64_t>(contents_.size());
    for (int64_t at = 0; length && at < nbytes_; at += length)
      OK(cudaMemcpy(static_cast<char*>(memory_) + at, contents_.data(),
                    static_cast<size_t>(std::min(length, nbytes_ - at)), cudaMemcpyDefault));
  }
  std::vector<unsigned char> values() const {
    std::vector<unsigned char> found(static_cast<size_t>(nbytes_));
    OK(cudaMemcpy(found.data(), memory_, found.size(), cudaMemcpyDefault));
    return found;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  std::vector<unsigned char> contents_;
  int64_t nbytes_;
  void* memory_ = nullptr;
};
using Arrays = std::vector<std::unique_ptr<Array>>;

template <class T>
std::vector<unsigned char> bytes_of(const std::vector<T>& values) {
  std::vector<unsigned char> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

uint32_t random_bits() {
  static uint64_t state = 11;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}
// Floats between -1 and 1 (0 and 1), at most a MiB of them.
std::vector<unsigned char> floats(int64_t count, bool positive = false) {
  std::vector<float> values(static_cast<size_t>(std::min<int64_t>(count, 1 << 20)));
  for (float& value : values) {
    value = static_cast<float>(random_bits() % 65536) / 65536;
    if (!positive) value = 2 * value - 1;
  }
  return bytes_of(values);
}

struct Variant {
  std::string name;
  std::function<void()> run;
};
// Variants that read and write the same arrays; the first is the truth.
struct Case {
  std::string kernel, what;
  int64_t nbytes;  // to be moved
  std::vector<Variant> variants;
  Arrays arrays;
  std::vector<size_t> results;  // numbers of arrays

  Array& add(std::vector<unsigned char> contents, int64_t nbytes = 0, bool result = false) {
    if (result) results.push_back(arrays.size());
    arrays.push_back(std::make_unique<Array>(std::move(contents), nbytes));
    return *arrays.back();
  }
};
using Made = std::shared_ptr<Case>;

// ---- optimizers

int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

template <class Call>
Variant walking(const char* name, void (*kernel)(Call, Walk), const Call& call, int64_t per_block) {
  const int64_t blocks = (call.flat.count + per_block - 1) / per_block;
  return {name, [=] { start_kernel(name, kernel, blocks, stream, call, Walk{0, per_block}); }};
}
// As many blocks as the device holds at once, each of one long stretch.
int64_t held(int64_t count, int blocks) { return rounded_up(count / (int64_t{multiprocessors()} * blocks) + 1, 1024); }

FlatBuffer flat_of(Case& made, int64_t count, int64_t segments, const std::vector<double>& groups,
                   const std::vector<double>& constants) {
  std::vector<int64_t> rows;
  std::vector<double> all;
  for (int64_t i = 0, begin = 0; i < segments; ++i) {
    const int64_t end = i + 1 == segments ? count : rounded_up(count / segments * (i + 1), 4) + (i % 7 ? 0 : 3);
    rows.insert(rows.end(), {begin, end - begin, 0, 3, 1});
    all.insert(all.end(), constants.begin(), constants.end());
    begin = end;
  }
  Array& parameters = made.add(floats(count), 4 * count, true);
  const Array &gradients = made.add(floats(count), 4 * count), &table = made.add(bytes_of(rows));
  const Array &room = made.add(bytes_of(all)), &hyper = made.add(bytes_of(groups));
  return {parameters.as<void>(),
          gradients.as<void>(),
          count,
          DType::f32,
          table.as<int64_t>(),
          segments,
          room.as<double>(),
          hyper.as<double>(),
          int64_t{1},
          nullptr,
          nullptr};
}

template <variants::Loads kLoads, bool kOnce, int kBlocks>
Variant adam_variant(const char* name, const AdamOf<false>& call, int64_t per_block) {
  return walking(name, variants::flat_kernel<float, kLoads, kOnce, kBlocks, AdamOf<false>>, call, per_block);
}

Made adamw(int64_t count, int64_t segments) {
  using namespace variants;
  auto made = std::make_shared<Case>(Case{"adamw", std::to_string(segments) + " segments", 28 * count, {}, {}, {}});
  // The constants as the first kernel of a step computes them, which is not timed here.
  const FlatBuffer flat = flat_of(*made, count, segments, {1e-3, 0.9, 0.999, 1e-8, 0.01, 0},
                                  {1, 1e-3 / 0.271, 0.0547, 0.1, 0.999, 0.001, 1e-8, 0, 1, 1 - 1e-5});
  Array &average = made->add(floats(count), 4 * count, true), &square = made->add(floats(count, true), 4 * count, true);
  const AdamOf<false> call{{flat, average.as<void>(), square.as<void>(), nullptr, true}};
  const int64_t tile = kFlatTile, before = 8192;
  made->variants = {
      adam_variant<kPlain, false, 4>("before: loads, arithmetic; 4 blocks", call, before),
      walking("shipped", adam_kernel<float, false>, call, tile),
      adam_variant<kAhead, false, 3>("next loads first; 3 blocks", call, tile),
      adam_variant<kAhead, false, 4>("next loads first; 4 blocks", call, tile),
      adam_variant<kAhead, false, 3>("next loads first; 3 blocks, persistent", call, held(count, 3)),
      adam_variant<kAhead, false, 4>("next loads first; 4 blocks, persistent", call, held(count, 4)),
      adam_variant<kPlain, false, 4>("before; 4 blocks, persistent", call, held(count, 4)),
      adam_variant<kTwo, false, 2>("two vectors together; 2 blocks", call, tile),
      adam_variant<kTwo, false, 3>("two vectors together; 3 blocks", call, tile),
      adam_variant<kPlain, true, 4>("before; .cs; 4 blocks", call, tile),
      adam_variant<kAhead, true, 3>("next loads first; .cs; 3 blocks", call, tile),
      adam_variant<kAhead, true, 4>("next loads first; .cs; 4 blocks", call, tile),
      adam_variant<kAhead, true, 3>("next loads first; .cs; 3 blocks, persistent", call, held(count, 3)),
      adam_variant<kAhead, true, 4>("next loads first; .cs; 4 blocks, persistent", call, held(count, 4)),
      adam_variant<kAhead, false, 3>("next loads first; 3 blocks, tiles of 16 Ki", call, 16384),
      adam_variant<kAhead, false, 3>("next loads first; 3 blocks, tiles of 8 Ki", call, 8192),
      adam_variant<kPlain, false, 4>("before; tiles of 4 Ki", call, tile),
  };
  return made;
}

Made sgd(int64_t count, int64_t segments) {
  using namespace variants;
  auto made = std::make_shared<Case>(Case{"sgd", std::to_string(segments) + " segments", 20 * count, {}, {}, {}});
  const FlatBuffer flat = flat_of(*made, count, segments, {1e-3, 0.9, 0, 0, 0, 0}, {1, 1e-3, 0.9, 1, 0, 1, 0, 0, 0, 0});
  const Sgd call{flat, made->add(floats(count), 4 * count, true).as<void>()};
  const int64_t tile = kFlatTile, before = 8192;
  made->variants = {
      walking("before: loads, arithmetic", flat_kernel<float, kPlain, false, 4, Sgd>, call, before),
      walking("shipped", sgd_kernel<float>, call, tile),
      walking("next loads first; persistent", flat_kernel<float, kAhead, false, 4, Sgd>, call, held(count, 4)),
      walking("two vectors together", flat_kernel<float, kTwo, false, 4, Sgd>, call, tile),
  };
  return made;
}

Made lion(int64_t count, int64_t segments) {
  using namespace variants;
  auto made = std::make_shared<Case>(Case{"lion", std::to_string(segments) + " segments", 20 * count, {}, {}, {}});
  const FlatBuffer flat =
      flat_of(*made, count, segments, {1e-4, 0.9, 0.99, 0.01, 0, 0}, {1, 1e-4, 0.1, 0.99, 0.01, 1 - 1e-6, 1, 0, 0, 0});
  const Lion call{flat, made->add(floats(count), 4 * count, true).as<void>()};
  const int64_t tile = kFlatTile, before = 8192;
  made->variants = {
      walking("before: loads, arithmetic", flat_kernel<float, kPlain, false, 4, Lion>, call, before),
      walking("shipped", lion_kernel<float>, call, tile),
      walking("next loads first; persistent", flat_kernel<float, kAhead, false, 4, Lion>, call, held(count, 4)),
      walking("two vectors together", flat_kernel<float, kTwo, false, 4, Lion>, call, tile),
  };
  return made;
}

// ---- gather_rows

template <class Out, int kWidth, int kRows>
Variant rows_variant(const char* name, const GatherRows& call) {
  const auto tiles = static_cast<uint32_t>((call.row_count + row_tile(kWidth) - 1) / row_tile(kWidth));
  const int64_t blocks = (call.index_count + kRows - 1) / kRows * tiles;
  return {name, [=] { start_kernel(name, gather_rows_kernel<Out, kWidth, kRows>, blocks, stream, call, tiles); }};
}

Made gather_rows(int64_t rows, int64_t row_count, int64_t batch) {
  auto made = std::make_shared<Case>(
      Case{"gather_rows", "rows of " + std::to_string(row_count), 5 * batch * row_count + 8 * batch, {}, {}, {}});
  std::vector<int64_t> index(static_cast<size_t>(batch));
  for (int64_t& each : index) each = random_bits() % rows;
  index[0] = rows;  // there is none: NaN
  std::vector<unsigned char> pixels(static_cast<size_t>(std::min<int64_t>(rows * row_count, 1 << 20)));
  for (unsigned char& each : pixels) each = static_cast<unsigned char>(random_bits());
  const auto* table = made->add(pixels, rows * row_count).as<uint8_t>();
  const auto* wanted = made->add(bytes_of(index)).as<int64_t>();
  auto* out = made->add(std::vector<unsigned char>(4096, 0xEE), 4 * batch * row_count, true).as<float>();
  const GatherRows call{table, rows, row_count, wanted, batch, 1.0f / 255, 0.5f, out, DType::f32};
  const int64_t tiles = (row_count + row_tile(4) - 1) / row_tile(4);
  made->variants = {
      {"before: stretches of a row in flight",
       [=] {
         start_kernel("before", before::gather_rows_kernel<float, 4>, tiles * call.index_count, stream, call, tiles);
       }},
      {"shipped", [=] { launch_gather_rows(call, stream); }},
  };
  if (4 * row_count <= row_tile(4)) made->variants.push_back(rows_variant<float, 4, 4>("four rows a block", call));
  if (2 * row_count <= row_tile(4)) made->variants.push_back(rows_variant<float, 4, 2>("two rows a block", call));
  made->variants.push_back(rows_variant<float, 4, 1>("one row a block", call));
  return made;
}

// ---- l2_norm and pack

// The moves of tables as they were; `tile` bytes of an array are a block's.
std::vector<std::pair<before::MoveTable, int64_t>> tables_before(const std::vector<Transferred>& all, int64_t tile) {
  std::vector<std::pair<before::MoveTable, int64_t>> tables;
  for (const Transferred& each : all) {
    if (tables.empty() || tables.back().first.count == before::kMoves) tables.emplace_back();
    auto& [table, tiles] = tables.back();
    table.moves[table.count] = {each.to, each.from, each.count};
    table.first_tile[table.count++] = static_cast<uint32_t>(tiles);
    tiles += std::max<int64_t>(1, (each.count + tile - 1) / tile);
  }
  return tables;
}

Made l2_norm(int64_t count, int64_t pieces) {
  auto made = std::make_shared<Case>(Case{"l2_norm", std::to_string(pieces) + " tensors", 4 * count, {}, {}, {}});
  auto* in = made->add(floats(count), 4 * count).as<float>();
  std::vector<Transferred> all;
  L2Norm call{{}, DType::f32, nullptr, nullptr, DType::f32};
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t begin = count / pieces * i, end = i + 1 == pieces ? count : count / pieces * (i + 1);
    all.push_back({nullptr, in + begin, end - begin});
    call.pieces.push_back({in + begin, 0, end - begin});
  }
  const int64_t tiles = norm_tiles(call.pieces);
  call.partials = made->add(std::vector<unsigned char>(static_cast<size_t>(8 * (tiles + 1)))).as<double>();
  call.out = made->add(std::vector<unsigned char>(4), 0, true).as<void>();
  const auto tables = tables_before(all, kNormTile);
  made->variants = {
      {"before: the root in a launch of its own",
       [=] {
         double* partials = call.partials;
         for (const auto& [table, blocks] : tables) {
           start_kernel("before", before::squares_kernel, blocks, stream, table, partials);
           partials += blocks;
         }
         start_kernel("before", before::root_kernel, 1, stream, call.partials, tiles, static_cast<float*>(call.out));
       }},
      {"shipped", [=] { launch_l2_norm(call, stream); }},
  };
  return made;
}

// `counts`: floats of each tensor, multiples of 4.
Made pack(const std::string& what, const std::vector<int64_t>& counts) {
  int64_t count = 0;
  for (int64_t each : counts) count += each;
  auto made = std::make_shared<Case>(Case{"pack", what, 8 * count, {}, {}, {}});
  auto *in = made->add(floats(count), 4 * count).as<float>(),
       *out = made->add(std::vector<unsigned char>(4096, 0xEE), 4 * count, true).as<float>();
  std::vector<Transferred> all;
  int64_t begin = 0;
  for (int64_t each : counts) {
    all.push_back({out + begin, in + begin, 4 * each});
    begin += each;
  }
  const auto tables = tables_before(all, 16 * kTileVectors);
  std::vector<Move> moves;
  std::vector<uint32_t> first;
  std::vector<uint16_t> owner;
  for (const Transferred& each : all) {
    first.push_back(static_cast<uint32_t>(owner.size()));
    owner.resize(owner.size() + static_cast<size_t>(tiles_of(extent_of(each.count, 0, 16))),
                 static_cast<uint16_t>(moves.size()));
    moves.push_back({each.to, each.from, each.count});
  }
  const auto* moves_there = made->add(bytes_of(moves)).as<Move>();
  const auto* first_there = made->add(bytes_of(first)).as<uint32_t>();
  const auto* owner_there = made->add(bytes_of(owner)).as<uint16_t>();
  const auto blocks_of_all = static_cast<int64_t>(owner.size());
  made->variants = {
      {"before: a search for the owner",
       [=] {
         for (const auto& [table, blocks] : tables) start_kernel("before", before::copy_kernel, blocks, stream, table);
       }},
      {"shipped", [=] { launch_copy(all, stream); }},
      {"one launch, its table in memory of the device",
       [=] {
         start_kernel("one", before::copy_of_a_table_kernel, blocks_of_all, stream, moves_there, first_there,
                      owner_there);
       }},
  };
  return made;
}

// ---- all of them

std::vector<int64_t> counts_of(int64_t tensors, int64_t count) {
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < tensors; ++i) counts.push_back(rounded_up(count / tensors, 4) + 4 * (i % 5));
  return counts;
}

using Maker = std::function<Made()>;
std::vector<Maker> cases(bool small) {
  const int64_t count = small ? 40'003 : int64_t{1} << 26, image = small ? 4100 : 224 * 224 * 3;
  const int64_t many = small ? 30 : 10'000, pixels = small ? 20'000 : count;
  return {
      [=] { return adamw(count, small ? 5 : 64); },
      [=] { return adamw(count, many); },
      [=] { return sgd(count, small ? 5 : 64); },
      [=] { return lion(count, small ? 5 : 64); },
      [=] { return gather_rows(small ? 20 : 60'000, 784, pixels / 784); },
      [=] { return gather_rows(small ? 20 : 50'000, 1'200, pixels / 1'200); },
      [=] { return gather_rows(small ? 20 : 50'000, 3'072, pixels / 3'072); },
      [=] { return gather_rows(small ? 9 : 2'000, image, pixels / image); },
      [=] { return l2_norm(count, 1); },
      [=] { return l2_norm(count, small ? 5 : 64); },
      [=] { return pack("64 tensors", counts_of(small ? 5 : 64, count)); },
      [=] { return pack("10,000 tensors", counts_of(small ? 1'100 : 10'000, count)); },
      [=] { return pack("4,000 small tensors", counts_of(small ? 300 : 4'000, small ? 60'000 : 4'000 * 1'200)); },
  };
}

// Returns how many variants do not make the bits of the first.
int differing(const Case& made) {
  std::vector<std::vector<unsigned char>> truth;
  int wrong = 0;
  for (const Variant& variant : made.variants) {
    for (const auto& each : made.arrays) each->reset();
    variant.run();
    OK(cudaStreamSynchronize(stream));
    std::vector<std::vector<unsigned char>> found;
    for (size_t number : made.results) found.push_back(made.arrays[number]->values());
    if (truth.empty()) truth = found;
    if (found == truth) continue;
    std::printf("%s, %s: other bits: %s\n", made.kernel.c_str(), made.what.c_str(), variant.name.c_str());
    ++wrong;
  }
  return wrong;
}

#ifndef MGPU_FAKE_CUDA
struct Times {
  double median, p90;
};
Times times_of(std::vector<float> ms) {
  std::sort(ms.begin(), ms.end());
  return {1e3 * ms[ms.size() / 2], 1e3 * ms[ms.size() * 9 / 10]};
}

void print_times(Case& made, int rounds) {
  constexpr size_t kFlush = size_t{1} << 30;
  void *flush = nullptr, *from = nullptr, *to = nullptr;
  const auto half = static_cast<size_t>(made.nbytes / 2);
  OK(cudaMalloc(&flush, kFlush));
  OK(cudaMalloc(&from, half));
  OK(cudaMalloc(&to, half));
  made.variants.push_back({"copy", [=] { OK(cudaMemcpyAsync(to, from, half, cudaMemcpyDeviceToDevice, stream)); }});
  cudaEvent_t begin, end;
  OK(cudaEventCreate(&begin));
  OK(cudaEventCreate(&end));
  std::vector<std::vector<float>> ms(made.variants.size());
  for (int round = -2; round < rounds; ++round)
    for (size_t i = 0; i < made.variants.size(); ++i) {
      OK(cudaMemsetAsync(flush, round & 0xff, kFlush, stream));
      OK(cudaEventRecord(begin, stream));
      made.variants[i].run();
      OK(cudaEventRecord(end, stream));
      OK(cudaEventSynchronize(end));
      float taken = 0;
      OK(cudaEventElapsedTime(&taken, begin, end));
      if (round >= 0) ms[i].push_back(taken);
    }
  const double copied = times_of(ms.back()).median;
  for (size_t i = 0; i < ms.size(); ++i) {
    const Times found = times_of(ms[i]);
    std::printf(
        "{\"kernel\": \"%s\", \"what\": \"%s\", \"variant\": \"%s\", \"us\": %.2f, \"p90\": %.2f, "
        "\"GBps\": %.0f, \"of_copy\": %.3f}\n",
        made.kernel.c_str(), made.what.c_str(), made.variants[i].name.c_str(), found.median, found.p90,
        static_cast<double>(made.nbytes) / found.median / 1e3, copied / found.median);
  }
  std::fflush(stdout);
  for (void* each : {flush, from, to}) OK(cudaFree(each));
  OK(cudaEventDestroy(begin));
  OK(cudaEventDestroy(end));
}
#endif

}  // namespace

int main(int argc, char** argv) {
#ifdef MGPU_FAKE_CUDA
  fakeCudaReset(1, 3);
#endif
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int wrong = 0;
  for (const Maker& make : cases(true)) {
    const Made made = make();
    wrong += differing(*made);
#ifdef MGPU_FAKE_CUDA
    no_faults();
    std::printf("%s, %s: %zu variants\n", made->kernel.c_str(), made->what.c_str(), made->variants.size());
#endif
  }
#ifndef MGPU_FAKE_CUDA
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 30;
  for (const Maker& make : cases(false)) print_times(*make(), rounds);
#else
  (void)argc;
  (void)argv;
#endif
  std::printf("variants with other bits: %d\n", wrong);
  return wrong != 0;
}
