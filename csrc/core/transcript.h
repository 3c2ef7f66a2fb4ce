// What calls did to memory, copy by copy and sum by sum, in order: for those who want to see how an algorithm works.
// A thread writes its own transcript, and only while it is open; otherwise a call pays for one look at a flag.
#pragma once

#include <cstdint>
#include <vector>

#include "core/device_ops.h"

namespace mgpu {

// One copy (one source, one target) or one sum (each source read once, the result written to each target).  Pointers
// are where each begins; of a strided copy the first run.
struct Deed {
  bool sums;
  std::vector<const void*> sources;
  std::vector<const void*> targets;
  int64_t nbytes;  // of each source and each target
  int call;        // deeds of one call of DeviceOps were put on the stream together
  Stream on;
  int64_t begin_ns;  // of the call, by CLOCK_MONOTONIC: on the host it is the work, on a GPU its launch
  int64_t end_ns;
};

void open_transcript();  // of the calling thread; what an open one held is dropped
std::vector<Deed> close_transcript();

// A decorator of a backend's DeviceOps: the same work, and copies and sums are written down.
class WatchedOps final : public DeviceOps {
 public:
  explicit WatchedOps(DeviceOps& ops) : ops_(ops) {}

  Event record(Stream on) override { return ops_.record(on); }
  void wait(Stream on, const Event& event) override { ops_.wait(on, event); }
  bool reached(const Event& event) override { return ops_.reached(event); }
  void synchronize(Stream on) override { ops_.synchronize(on); }
  std::shared_ptr<void> make_current(int device) override { return ops_.make_current(device); }
  std::shared_ptr<void> staging(int64_t nbytes, const Streams& users) override { return ops_.staging(nbytes, users); }
  void keep(Stream on, std::shared_ptr<void> memory) override { ops_.keep(on, std::move(memory)); }

  void copy(const std::vector<CopyBlock>& blocks, Stream on) override;
  void sum_ranks(const std::vector<SumRanks>& calls, Stream on) override;
  void gather_rows(const GatherRows& call, Stream on) override { ops_.gather_rows(call, on); }
  void pack(const Packing& call, Stream on) override { ops_.pack(call, on); }
  void unpack(const Packing& call, Stream on) override { ops_.unpack(call, on); }
  void scale_cast(const ScaleCast& call, Stream on) override { ops_.scale_cast(call, on); }
  void l2_norm(const L2Norm& call, Stream on) override { ops_.l2_norm(call, on); }
  void sgd(const Sgd& call, Stream on) override { ops_.sgd(call, on); }
  void adam(const Adam& call, Stream on) override { ops_.adam(call, on); }
  void lion(const Lion& call, Stream on) override { ops_.lion(call, on); }

 private:
  DeviceOps& ops_;
};

}  // namespace mgpu
