// Door 1 on GPUs.  Each call looks at its pointers, makes the stream's device current, launches, and returns at once.
#include "backends/cuda/cuda.h"
#include "backends/cuda/guard.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/memory.h"
#include "core/buffers.h"

namespace mgpu::cuda {
namespace {

// Below this a batch of copies is one kernel; above it each has a copy engine of its own to gain.
constexpr int64_t kKernelCopyNbytes = 1024 * 1024;
// Of a longer list only so many pointers are looked at: a look costs some hundred nanoseconds, and a list comes from
// tensors of one device.
constexpr size_t kLooks = 64;

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

void look_at(const std::vector<Piece>& pieces, Stream on, const char* what) {
  for (size_t i = 0; i < std::min(pieces.size(), kLooks); ++i) require_reachable(pieces[i].pointer, on, what);
}

void look_at(const SumRanks& call, Stream on) {
  for (const void* in : call.in) require_reachable(in, on, "sum_ranks");
  for (const void* out : call.out) require_reachable(out, on, "sum_ranks");
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

void look_at(const FlatParameters& flat, std::initializer_list<const void*> states, Stream on, const char* what) {
  for (const void* pointer :
       {static_cast<const void*>(flat.parameters), flat.gradients, static_cast<const void*>(flat.segments),
        static_cast<const void*>(flat.constants), static_cast<const void*>(flat.groups)})
    require_reachable(pointer, on, what);
  for (const void* pointer : states)
    if (pointer) require_reachable(pointer, on, what);
  for (const float* pointer : {flat.clip, flat.loss_scale, flat.found_inf})
    if (pointer) require_reachable(pointer, on, what);
}

void move_pieces(const Packing& call, bool into_flat, Stream on, const char* what) {
  if (call.pieces.empty()) return;
  const DeviceGuard guard(on.device);
  require_reachable(call.flat, on, what);
  look_at(call.pieces, on, what);
  const bool as_bytes = call.dtype == call.flat_dtype && call.scale == 1;
  std::vector<Transferred> all;
  for (const Piece& piece : call.pieces) {
    void* place = at({call.flat, 0, call.flat_dtype}, piece.begin);
    const int64_t count = as_bytes ? piece.count * static_cast<int64_t>(itemsize(call.dtype)) : piece.count;
    all.push_back(into_flat ? Transferred{place, piece.pointer, count} : Transferred{piece.pointer, place, count});
  }
  if (as_bytes) return launch_copy(all, handle_of(on));
  launch_cast(all, into_flat ? call.dtype : call.flat_dtype, into_flat ? call.flat_dtype : call.dtype, call.scale,
              handle_of(on));
}

class CudaDeviceOps final : public DeviceOps {
 public:
  Event record(Stream on) override { return on.device == kHost ? nullptr : record_event(on); }
  void wait(Stream on, const Event& event) override {
    if (event) wait_for_event(on, event);
  }
  bool reached(const Event& event) override { return !event || event_reached(event); }
  void synchronize(Stream on) override {
    if (on.device == kHost) return;
    const DeviceGuard guard(on.device);
    check(cudaStreamSynchronize(handle_of(on)), "cudaStreamSynchronize");
  }
  std::shared_ptr<void> make_current(int device) override { return std::make_shared<DeviceGuard>(device); }

  std::shared_ptr<void> staging(int64_t nbytes) override { return pinned(nbytes); }
  void keep(Stream on, std::shared_ptr<void> memory) override {
    if (on.device != kHost) keep_pinned(on, std::move(memory));
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
    size_t looks = 0;
    for (const SumRanks& call : calls) {
      if (call.count == 0) continue;  // memory of nothing has no address
      if (looks++ < kLooks) look_at(call, on);
      if (!together.empty() && !are_alike(*together[0], call)) sum_together(together, on);
      if (calls.size() > 1 && fits_a_table(call))
        together.push_back(&call);
      else
        launch_sum_ranks(call, handle_of(on));
    }
    if (!together.empty()) sum_together(together, on);
  }

  void gather_rows(const GatherRows& call, Stream on) override {
    if (call.index_count * call.row_count == 0) return;
    const DeviceGuard guard(on.device);
    if (call.rows_count > 0) require_reachable(call.rows, on, "gather_rows");  // memory of nothing has no address
    require_reachable(call.index, on, "gather_rows");
    require_reachable(call.out, on, "gather_rows");
    launch_gather_rows(call, handle_of(on));
  }

  void pack(const Packing& call, Stream on) override { move_pieces(call, true, on, "pack"); }
  void unpack(const Packing& call, Stream on) override { move_pieces(call, false, on, "unpack"); }

  void scale_cast(const ScaleCast& call, Stream on) override {
    if (call.count == 0) return;
    const DeviceGuard guard(on.device);
    require_reachable(call.in, on, "scale_cast");
    require_reachable(call.out, on, "scale_cast");
    launch_cast({{call.out, call.in, call.count}}, call.in_dtype, call.out_dtype, call.scale, handle_of(on));
  }

  void l2_norm(const L2Norm& call, Stream on) override {
    const DeviceGuard guard(on.device);
    look_at(call.pieces, on, "l2_norm");
    require_reachable(call.partials, on, "l2_norm");
    require_reachable(call.out, on, "l2_norm");
    launch_l2_norm(call, handle_of(on));
  }

  void sgd(const Sgd& call, Stream on) override {
    if (call.flat.count * call.flat.segment_count == 0) return;
    const DeviceGuard guard(on.device);
    look_at(call.flat, {call.momentum}, on, "sgd");
    launch_sgd(call, handle_of(on));
  }
  void adam(const Adam& call, Stream on) override {
    if (call.flat.count * call.flat.segment_count == 0) return;
    const DeviceGuard guard(on.device);
    look_at(call.flat, {call.exp_avg, call.exp_avg_sq, call.max_exp_avg_sq}, on, "adam");
    launch_adam(call, handle_of(on));
  }
};

}  // namespace

DeviceOps& device_ops() {
  static auto* ops = new CudaDeviceOps;  // never destroyed: worker threads may use it until the process is gone
  return *ops;
}

}  // namespace mgpu::cuda
