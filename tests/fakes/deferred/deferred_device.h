// A backend of several devices in host memory whose streams are as late as they may be.
//
// What is put on a stream waits in a queue.  It runs only when somebody forces it: a synchronize, or a wait of another
// stream that is forced itself; and then only up to the point that was asked for.  Between two steps the seed decides
// whether some other stream, which nobody asked, gets ahead.  So a missing wait is not a race that a test may win: with
// some seed, work that should have been waited for has not run, or has run too early.
//
// Staging memory that is given back is poisoned at once, and work that touches it later is an error; so is work on
// memory that its device does not reach.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "core/device_ops.h"

namespace mgpu::fakes {

constexpr unsigned char kPoison = 0xEE;

class DeferredDevice final : public DeviceOps {
 public:
  // `host` computes; `reach` says which device may touch which other's memory.
  DeferredDevice(uint64_t seed, DeviceOps& host, Reach reach);
  ~DeferredDevice() override;

  Stream new_stream(int device);
  // Poisoned memory of a device, which lives as long as the backend.
  void* allocate(int device, int64_t nbytes);
  // Any work of a test; `step` returns whether it is finished: if not, it is asked again later.
  void submit(Stream on, std::function<bool()> step);
  // Runs all queues as far as they go.
  void run_all();
  // Whether all queues are empty and all staging memory has come back.
  bool idle() const;

  Event record(Stream on) override;
  void wait(Stream on, const Event& event) override;
  bool reached(const Event& event) override;
  void synchronize(Stream on) override;
  bool is_captured(Stream) override { return false; }
  std::shared_ptr<void> make_current(int device) override;
  std::shared_ptr<void> staging(int64_t nbytes, const Streams& users) override;
  void keep(Stream on, std::shared_ptr<void> memory) override;

  void copy(const std::vector<CopyBlock>& blocks, Stream on) override;
  void sum_ranks(const std::vector<SumRanks>& calls, Stream on) override;
  void gather_rows(const GatherRows& call, Stream on) override;
  void pack(const Packing& call, Stream on) override;
  void unpack(const Packing& call, Stream on) override;
  void scale_cast(const ScaleCast& call, Stream on) override;
  void l2_norm(const L2Norm& call, Stream on) override;
  void sgd(const Sgd& call, Stream on) override;
  void adam(const Adam& call, Stream on) override;
  void lion(const Lion& call, Stream on) override;

 private:
  struct Step;
  struct Queue;
  struct Mark;
  struct Staged {
    std::unique_ptr<char[]> memory;  // for as long as the backend lives, so that a late reader finds poison
    int64_t nbytes;
    bool alive;
  };

  Queue& queue_of(Stream on);
  void run(Stream on, std::function<void()> work);
  void force(Queue& queue, size_t until);
  bool try_step(Queue& queue);
  void let_others_run(const Queue& forced);
  void run_on(Stream on, std::vector<const void*> touched, std::function<void()> work);
  void require_reach(Stream on, const void* pointer) const;
  void require_alive(const void* pointer) const;

  DeviceOps& host_;
  Reach reach_;
  std::mt19937_64 random_;
  double eagerness_;  // how often somebody else gets ahead: 0 is as late as possible
  int current_ = 0;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::map<const char*, std::pair<int64_t, int>> owners_;  // start -> size, device
  std::vector<std::unique_ptr<char[]>> memory_;
  std::shared_ptr<std::map<const char*, Staged>> staged_ = std::make_shared<std::map<const char*, Staged>>();
};

}  // namespace mgpu::fakes
