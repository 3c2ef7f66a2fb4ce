// DeviceOps on GPUs.  Each call makes the stream's device current, launches, and returns at once.  Pointers are
// trusted: to ask the driver about each would cost more than many a launch.
#include "backends/cuda/cuda.h"
#include "backends/cuda/guard.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/memory.h"
#include "core/buffers.h"

namespace mgpu::cuda {
namespace {

// Copies of a batch up to this size are done by one kernel, larger ones by the copy engines.
constexpr int64_t kKernelCopyNbytes = 1024 * 1024;

bool is_dense(const CopyBlock& block) {
  return block.rows == 1 || (block.to_pitch == block.row_nbytes && block.from_pitch == block.row_nbytes);
}

void copy_block(const CopyBlock& block, cudaStream_t stream) {
  if (is_dense(block)) {
    const auto nbytes = static_cast<size_t>(block.rows * block.row_nbytes);
    return check(cudaMemcpyAsync(block.to, block.from, nbytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  }
  check(cudaMemcpy2DAsync(block.to, static_cast<size_t>(block.to_pitch), block.from,
                          static_cast<size_t>(block.from_pitch), static_cast<size_t>(block.row_nbytes),
                          static_cast<size_t>(block.rows), cudaMemcpyDefault, stream),
        "cudaMemcpy2DAsync");
}

bool are_alike(const SumRanks& one, const SumRanks& other) {
  return one.dtype == other.dtype && one.in.size() == other.in.size() && fits_a_table(other);
}

// The sum of one array is a copy of it.
void sum_together(std::vector<const SumRanks*>& calls, Stream on) {
  if (calls[0]->in.size() > 1) {
    launch_sums(calls, handle_of(on));
  } else {
    std::vector<Transferred> all;
    for (const SumRanks* call : calls)
      if (call->in[0] != call->out[0])
        all.push_back({call->out[0], call->in[0], call->count * static_cast<int64_t>(itemsize(call->dtype))});
    if (!all.empty()) launch_copy(all, handle_of(on));
  }
  calls.clear();
}

void move_pieces(const Packing& call, bool into_flat, Stream on) {
  if (call.pieces.empty()) return;
  const DeviceGuard guard(on.device);
  const bool as_bytes = call.dtype == call.flat_dtype && call.scale == 1;
  std::vector<Transferred> all;
  for (const Piece& piece : call.pieces) {
    void* in_flat = at({call.flat, 0, call.flat_dtype}, piece.begin);
    const int64_t count = as_bytes ? piece.count * static_cast<int64_t>(itemsize(call.dtype)) : piece.count;
    all.push_back(into_flat ? Transferred{in_flat, piece.pointer, count} : Transferred{piece.pointer, in_flat, count});
  }
  if (as_bytes) return launch_copy(all, handle_of(on));
  launch_cast(all, into_flat ? call.dtype : call.flat_dtype, into_flat ? call.flat_dtype : call.dtype, call.scale,
              handle_of(on));
}

class CudaDeviceOps final : public DeviceOps {
 public:
  Event record(Stream on) override { return on.on_host() ? nullptr : record_event(on); }
  void wait(Stream on, const Event& event) override {
    if (event) wait_for_event(on, event);
  }
  bool reached(const Event& event) override { return !event || event_reached(event); }
  void synchronize(Stream on) override {
    if (on.on_host()) return;
    const DeviceGuard guard(on.device);
    check(cudaStreamSynchronize(handle_of(on)), "cudaStreamSynchronize");
  }
  bool is_captured(Stream on) override { return is_capturing(on); }
  std::shared_ptr<void> make_current(int device) override { return std::make_shared<DeviceGuard>(device); }

  std::shared_ptr<void> staging(int64_t nbytes, const Streams& users) override { return pinned(nbytes, users); }
  void keep(Stream on, std::shared_ptr<void> memory) override {
    if (!on.on_host()) keep_pinned(on, std::move(memory));
  }

  void copy(const std::vector<CopyBlock>& blocks, Stream on) override {
    const DeviceGuard guard(on.device);
    std::vector<Transferred> small;
    for (const CopyBlock& block : blocks) {
      const int64_t nbytes = block.rows * block.row_nbytes;
      if (nbytes == 0) continue;
      if (is_dense(block) && nbytes <= kKernelCopyNbytes)
        small.push_back({block.to, block.from, nbytes});
      else
        copy_block(block, handle_of(on));
    }
    if (small.size() == 1)
      check(cudaMemcpyAsync(small[0].to, small[0].from, static_cast<size_t>(small[0].count), cudaMemcpyDefault,
                            handle_of(on)),
            "cudaMemcpyAsync");
    else if (!small.empty())
      launch_copy(small, handle_of(on));
  }

  void sum_ranks(const std::vector<SumRanks>& calls, Stream on) override {
    const DeviceGuard guard(on.device);
    std::vector<const SumRanks*> together;
    for (const SumRanks& call : calls) {
      if (call.count == 0) continue;
      if (!together.empty() && !are_alike(*together[0], call)) sum_together(together, on);
      if (calls.size() > 1 && fits_a_table(call))
        together.push_back(&call);
      else
        launch_sum_ranks(call, handle_of(on));
    }
    if (!together.empty()) sum_together(together, on);
  }

  void push_sum(const PushSum& call, Stream on) override {
    const DeviceGuard guard(on.device);
    launch_push_sum(call, handle_of(on));
  }

  void gather_rows(const GatherRows& call, Stream on) override {
    if (call.index_count * call.row_count == 0) return;
    const DeviceGuard guard(on.device);
    launch_gather_rows(call, handle_of(on));
  }

  void pack(const Packing& call, Stream on) override { move_pieces(call, true, on); }
  void unpack(const Packing& call, Stream on) override { move_pieces(call, false, on); }

  void scale_cast(const ScaleCast& call, Stream on) override {
    if (call.count == 0) return;
    const DeviceGuard guard(on.device);
    launch_cast({{call.out, call.in, call.count}}, call.in_dtype, call.out_dtype, call.scale, handle_of(on));
  }

  void l2_norm(const L2Norm& call, Stream on) override {
    const DeviceGuard guard(on.device);
    launch_l2_norm(call, handle_of(on));
  }

  void sgd(const Sgd& call, Stream on) override {
    if (call.flat.count * call.flat.segment_count == 0) return;
    const DeviceGuard guard(on.device);
    launch_sgd(call, handle_of(on));
  }
  void adam(const Adam& call, Stream on) override {
    if (call.flat.count * call.flat.segment_count == 0) return;
    const DeviceGuard guard(on.device);
    launch_adam(call, handle_of(on));
  }
  void lion(const Lion& call, Stream on) override {
    if (call.flat.count * call.flat.segment_count == 0) return;
    const DeviceGuard guard(on.device);
    launch_lion(call, handle_of(on));
  }
};

}  // namespace

DeviceOps& device_ops() {
  static auto* ops = new CudaDeviceOps;  // never destroyed: worker threads may use it until the process is gone
  return *ops;
}

}  // namespace mgpu::cuda
