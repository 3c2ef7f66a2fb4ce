#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cpu/cpu.h"
#include "backends/cpu/kernels.h"
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
    const int64_t grain = std::max<int64_t>(1, kSerialNbytes / std::max<int64_t>(1, call.row_count));
    parallel_for(call.index_count, grain, [&](int64_t begin, int64_t end) { kernels().gather_rows(call, begin, end); });
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
