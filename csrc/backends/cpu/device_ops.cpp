#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>

#include "backends/cpu/cpu.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/thread_pool.h"
#include "core/buffers.h"
#include "core/error.h"

namespace mgpu::cpu {
namespace {

// Waking a thread takes some 30 us, and more while torch's own threads still spin; in that time one core adds up half a
// million numbers that lie in its cache.
constexpr Grain kBytes{1024 * 1024, 256 * 1024};   // of a copy
constexpr Grain kElements{512 * 1024, 64 * 1024};  // where something is computed

// Runs that touch are one run: a whole tensor, or a chunk along the slowest dimension, is a single memcpy.
CopyBlock merged(CopyBlock block) {
  if (block.to_pitch == block.row_nbytes && block.from_pitch == block.row_nbytes) {
    block.row_nbytes *= block.rows;
    block.rows = 1;
  }
  return block;
}

// Bytes [begin, end) of the block, counted along its runs.
void copy_bytes(const CopyBlock& block, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t row = begin / block.row_nbytes, offset = begin % block.row_nbytes;
    const int64_t nbytes = std::min(end - begin, block.row_nbytes - offset);
    std::memcpy(static_cast<char*>(block.to) + row * block.to_pitch + offset,
                static_cast<const char*>(block.from) + row * block.from_pitch + offset, nbytes);
    begin += nbytes;
  }
}

// Before the threads of the pool begin, which must not throw.
void require_floating(const char* kernel, std::initializer_list<DType> dtypes) {
  for (DType dtype : dtypes)
    if (!is_floating(dtype)) refuse_dtype(kernel, dtype);
}

void require_index(const GatherRows& call) {
  for (int64_t i = 0; i < call.index_count; ++i)
    require(call.index[i] >= 0 && call.index[i] < call.rows_count,
            "index[" + std::to_string(i) + "] is " + std::to_string(call.index[i]) + ", but there are " +
                std::to_string(call.rows_count) + " rows");
}

// Copies or casts between the pieces and the flat buffer; each piece is a job.
void cast_pieces(const Packing& call, bool into_flat) {
  const bool as_bytes = call.dtype == call.flat_dtype && call.scale == 1;
  if (!as_bytes) require_floating("a cast", {call.dtype, call.flat_dtype});
  std::vector<ScaleCast> casts;
  std::vector<CopyBlock> copies;
  std::vector<int64_t> counts;
  for (const Piece& piece : call.pieces) {
    void* in_flat = at({call.flat, 0, call.flat_dtype}, piece.begin);
    void *from = into_flat ? piece.pointer : in_flat, *to = into_flat ? in_flat : piece.pointer;
    if (as_bytes)
      copies.push_back({to, from, 1, piece.count * static_cast<int64_t>(itemsize(call.dtype)), 0, 0});
    else
      casts.push_back({from, into_flat ? call.dtype : call.flat_dtype, to, into_flat ? call.flat_dtype : call.dtype,
                       piece.count, call.scale});
    counts.push_back(piece.count);
  }
  if (as_bytes) return device_ops().copy(copies, {});
  parallel_pieces(counts, kElements,
                  [&](size_t i, int64_t begin, int64_t end) { kernels().scale_cast(casts[i], begin, end); });
}

// Checked at every step: the table may have been changed since the last one.
void require_inside(const FlatBuffer& flat, const int64_t* segment) {
  const int64_t begin = segment[kBegin], count = segment[kCount];
  require(begin >= 0 && count >= 0 && begin <= flat.count && count <= flat.count - begin,
          "a segment of " + std::to_string(count) + " elements begins at " + std::to_string(begin) +
              ", but the flat buffers have " + std::to_string(flat.count));
}

// Raises the steps of the segments that take part, then runs them.
void for_each_segment(const FlatBuffer& flat, const std::function<void(const SegmentRange&)>& run) {
  require_floating("an optimizer", {flat.dtype});
  if (flat.found_inf && *flat.found_inf != 0) return;
  std::vector<int64_t*> active;
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < flat.segment_count; ++i) {
    int64_t* segment = flat.segments + i * kSegmentColumns;
    if (!segment[kActive] || segment[kGroup] < 0 || segment[kGroup] >= flat.group_count) continue;
    require_inside(flat, segment);
    require(!flat.gradient_of || flat.gradient_of[i] || !segment[kCount], "an active segment has no gradient");
    active.push_back(segment);
    counts.push_back(segment[kCount]);
  }
  for (int64_t* segment : active) ++segment[kStep];
  parallel_pieces(counts, kElements, [&](size_t i, int64_t begin, int64_t end) { run({active[i], begin, end}); });
}

class CpuDeviceOps final : public DeviceOps {
 public:
  // What is asked for is done when the call returns, so there is nothing to wait for.
  Event record(Stream) override { return nullptr; }
  void wait(Stream, const Event&) override {}
  bool reached(const Event&) override { return true; }
  void synchronize(Stream) override {}
  bool is_captured(Stream) override { return false; }
  std::shared_ptr<void> make_current(int) override { return nullptr; }

  std::shared_ptr<void> staging(int64_t nbytes, const Streams&) override {
    return {::operator new(static_cast<size_t>(nbytes)), [](void* memory) { ::operator delete(memory); }};
  }
  void keep(Stream, std::shared_ptr<void>) override {}

  void copy(const std::vector<CopyBlock>& blocks, Stream) override {
    std::vector<CopyBlock> runs;
    std::vector<int64_t> nbytes;
    for (const CopyBlock& block : blocks) {
      if (block.rows * block.row_nbytes == 0) continue;
      runs.push_back(merged(block));
      nbytes.push_back(block.rows * block.row_nbytes);
    }
    parallel_pieces(nbytes, kBytes, [&](size_t i, int64_t begin, int64_t end) { copy_bytes(runs[i], begin, end); });
  }

  void sum_ranks(const std::vector<SumRanks>& calls, Stream) override {
    std::vector<int64_t> counts;
    for (const SumRanks& call : calls) counts.push_back(call.count);
    parallel_pieces(counts, kElements, [&](size_t i, int64_t begin, int64_t end) {
      const SumRanks& call = calls[i];
      kernels().reduce({call.in.data(), static_cast<int>(call.in.size()), call.out.data(),
                        static_cast<int>(call.out.size()), begin, end, call.dtype, call.op, call.divisor});
    });
  }

  void gather_rows(const GatherRows& call, Stream) override {
    if (!is_floating(call.out_dtype) || call.out_dtype == DType::f64) refuse_dtype("gather_rows", call.out_dtype);
    require_index(call);
    const auto rows = [&](int64_t count) { return std::max<int64_t>(1, count / std::max<int64_t>(1, call.row_count)); };
    parallel_for(call.index_count, {rows(kElements.serial), rows(kElements.piece)},
                 [&](int64_t begin, int64_t end) { kernels().gather_rows(call, begin, end); });
  }

  void pack(const Packing& call, Stream) override { cast_pieces(call, true); }
  void unpack(const Packing& call, Stream) override { cast_pieces(call, false); }

  void scale_cast(const ScaleCast& call, Stream) override {
    require_floating("scale_cast", {call.in_dtype, call.out_dtype});
    parallel_for(call.count, kElements, [&](int64_t begin, int64_t end) { kernels().scale_cast(call, begin, end); });
  }

  void l2_norm(const L2Norm& call, Stream) override {
    require_floating("l2_norm", {call.dtype});
    if (call.out_dtype != DType::f32 && call.out_dtype != DType::f64)
      refuse_dtype("the result of l2_norm", call.out_dtype);
    std::vector<Piece> tiles;
    for (const Piece& piece : call.pieces)
      for (int64_t begin = 0; begin < piece.count; begin += kNormTile)
        tiles.push_back({piece.pointer, begin, std::min(kNormTile, piece.count - begin)});
    parallel_for(
        static_cast<int64_t>(tiles.size()), {kElements.serial / kNormTile, 2}, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i)
            call.partials[i] =
                kernels().sum_of_squares(tiles[i].pointer, call.dtype, tiles[i].begin, tiles[i].begin + tiles[i].count);
        });
    double total = 0;
    for (size_t i = 0; i < tiles.size(); ++i) total += call.partials[i];
    const double norm = std::sqrt(total);
    if (call.out_dtype == DType::f64)
      *static_cast<double*>(call.out) = norm;
    else
      *static_cast<float*>(call.out) = static_cast<float>(norm);
  }

  void sgd(const Sgd& call, Stream) override {
    const bool has_none = !call.momentum && call.flat.count;  // an empty buffer has no address either
    for (int64_t group = 0; has_none && group < call.flat.group_count; ++group)
      require(call.flat.groups[group * kSgdColumns + kMomentum] == 0,
              "a group has momentum, but there is no momentum buffer");
    for_each_segment(call.flat, [&](const SegmentRange& range) { kernels().sgd(call, range); });
  }
  void adam(const Adam& call, Stream) override {
    for_each_segment(call.flat, [&](const SegmentRange& range) { kernels().adam(call, range); });
  }
  void lion(const Lion& call, Stream) override {
    for_each_segment(call.flat, [&](const SegmentRange& range) { kernels().lion(call, range); });
  }
};

}  // namespace

DeviceOps& device_ops() {
  static CpuDeviceOps ops;
  return ops;
}

const Backend& backend() {
  static const Backend cpu{"cpu",
                           true,
                           [] { return std::to_string(num_threads()) + " threads"; },
                           device_ops,
                           [](int, int) { return true; },
                           [] { return 1; },
                           [] { return 0; },
                           [] { return 0; },
                           [](int) { return true; },
                           [](const void*, int, const std::string&) {},
                           [](const std::vector<std::pair<int, int>>&) {}};
  return cpu;
}

int num_threads() { return ThreadPool::of_this_process().num_threads(); }
void set_num_threads(int threads) { ThreadPool::of_this_process().set_num_threads(threads); }

}  // namespace mgpu::cpu
