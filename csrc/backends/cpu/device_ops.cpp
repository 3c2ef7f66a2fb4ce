#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cpu/cpu.h"
#include "backends/cpu/lanes.h"
#include "backends/cpu/targets.h"
#include "backends/cpu/thread_pool.h"
#include "core/error.h"

namespace mgpu::cpu {
namespace {

constexpr int64_t kSerialNbytes = 256 * 1024;  // below this, waking a thread costs more than the copy

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

// Rows of uint8 -> normalised floats.  A vector of 8 at a time: the same arithmetic as a store of a reduction.
template <class Out>
MGPU_INLINE void normalise(const uint8_t* from, int64_t count, float scale, float shift, Out* to) {
  using U8x8 = uint8_t __attribute__((vector_size(8)));
  const auto convert = [&](U8x8 packed) { return __builtin_convertvector(packed, F32x8) * scale + shift; };
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    U8x8 packed;
    std::memcpy(&packed, from + i, 8);
    store_floats(to + i, convert(packed));
  }
  if (i == count) return;
  U8x8 packed = {};
  Out pad[8];
  std::memcpy(&packed, from + i, count - i);
  store_floats(pad, convert(packed));
  std::memcpy(to + i, pad, (count - i) * sizeof(Out));
}

// Rows lie anywhere, so no hardware guesses the next one: it is asked for while this one is converted.
MGPU_INLINE void prefetch_row(const GatherRows& c, int64_t i) {
  const uint8_t* row = c.rows + c.index[i] * c.row_count;
  for (int64_t line = 0; line < std::min<int64_t>(c.row_count, 2048); line += 64) __builtin_prefetch(row + line);
}

template <class Out>
MGPU_INLINE void gather_range(const GatherRows& c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + 2 < end) prefetch_row(c, i + 2);
    normalise(c.rows + c.index[i] * c.row_count, c.row_count, c.scale, c.shift,
              static_cast<Out*>(c.out) + i * c.row_count);
  }
}

MGPU_CLONES void gather_f32(const GatherRows& c, int64_t begin, int64_t end) { gather_range<float>(c, begin, end); }
MGPU_CLONES void gather_f16(const GatherRows& c, int64_t begin, int64_t end) { gather_range<F16>(c, begin, end); }
MGPU_CLONES void gather_bf16(const GatherRows& c, int64_t begin, int64_t end) { gather_range<BF16>(c, begin, end); }

void require_index(const GatherRows& call) {
  for (int64_t i = 0; i < call.index_count; ++i)
    require(call.index[i] >= 0 && call.index[i] < call.rows_count,
            "index[" + std::to_string(i) + "] is " + std::to_string(call.index[i]) + ", but there are " +
                std::to_string(call.rows_count) + " rows");
}

class CpuDeviceOps final : public DeviceOps {
 public:
  void copy(const std::vector<CopyBlock>& blocks) override {
    std::vector<CopyBlock> runs;
    std::vector<int64_t> nbytes;
    for (const CopyBlock& block : blocks) {
      if (block.rows * block.row_nbytes == 0) continue;
      runs.push_back(merged(block));
      nbytes.push_back(block.rows * block.row_nbytes);
    }
    parallel_pieces(nbytes, kSerialNbytes,
                    [&](size_t i, int64_t begin, int64_t end) { copy_bytes(runs[i], begin, end); });
  }

  void gather_rows(const GatherRows& call) override {
    require_index(call);
    const auto range = call.out_dtype == DType::f32   ? gather_f32
                       : call.out_dtype == DType::f16 ? gather_f16
                                                      : gather_bf16;
    const int64_t grain = std::max<int64_t>(1, kSerialNbytes / std::max<int64_t>(1, call.row_count));
    parallel_for(call.index_count, grain, [&](int64_t begin, int64_t end) { range(call, begin, end); });
  }
};

}  // namespace

DeviceOps& device_ops() {
  static CpuDeviceOps ops;
  return ops;
}

int num_threads() { return ThreadPool::of_this_process().num_threads(); }
void set_num_threads(int threads) { ThreadPool::of_this_process().set_num_threads(threads); }

}  // namespace mgpu::cpu
