// The op log: which copies and sums calls made, in order, for those who want to see how an algorithm works.  A thread
// logs its own calls, and only while its log is open; otherwise a call pays for one look at a flag.
#pragma once

#include <cstdint>
#include <vector>

#include "core/device_ops.h"

namespace mgpu {

// One copy (one source, one target) or one sum (each source is read once, the result is written to each target).
struct OpRecord {
  bool is_sum;
  std::vector<const void*> sources;  // addresses of the first bytes; of a strided copy those of its first run
  std::vector<const void*> targets;
  int64_t nbytes;  // of each source and each target
  int call;        // number of the call of DeviceOps; its records were put on the stream together
  Stream stream;
  int64_t begin_ns;  // of the call, by CLOCK_MONOTONIC: on the host it is the work, on a GPU its launch
  int64_t end_ns;
};

void open_op_log();  // of the calling thread; drops what an open log held
std::vector<OpRecord> close_op_log();

// A decorator of a backend's DeviceOps: the same work, and copies and sums are logged.
class LoggingDeviceOps final : public DeviceOps {
 public:
  explicit LoggingDeviceOps(DeviceOps& ops) : ops_(ops) {}

  Event record(Stream on) override { return ops_.record(on); }
  void wait(Stream on, const Event& event) override { ops_.wait(on, event); }
  bool reached(const Event& event) override { return ops_.reached(event); }
  void synchronize(Stream on) override { ops_.synchronize(on); }
  bool is_captured(Stream on) override { return ops_.is_captured(on); }
  std::shared_ptr<void> make_current(int device) override { return ops_.make_current(device); }
  std::shared_ptr<void> staging(int64_t nbytes, const Streams& users) override { return ops_.staging(nbytes, users); }
  void keep(Stream on, std::shared_ptr<void> memory) override { ops_.keep(on, std::move(memory)); }

  void copy(const std::vector<CopyBlock>& blocks, Stream on) override;
  void sum_ranks(const std::vector<SumRanks>& calls, Stream on) override;
  void push_sum(const PushSum& call, Stream on) override { ops_.push_sum(call, on); }
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
