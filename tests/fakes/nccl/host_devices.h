// Several devices in host memory whose streams run as soon as they can: work that does not wait runs in the call, and
// the rest when somebody asks whether it has.  Any thread may use them.  NCCL's work comes through the fake's hooks,
// which the last one made of these owns.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "backends/cpu/cpu.h"
#include "core/device_ops.h"
#include "fakes/nccl/fake_nccl.h"

namespace mgpu::fakes {

class HostDevices final : public DeviceOps {
 public:
  using Step = std::function<bool()>;  // whether it is finished; if not, it is asked again later

  HostDevices() {
    of_hooks() = this;
    fakeNcclSetEnqueue(enqueue);
    // As CUDA has it: a thread without a context finds device 0, and gets a context there when it sets it back.
    fakeNcclSetCurrentDevice([] { return std::max(current(), 0); },
                             [](int device) { of_hooks()->make_context(device); });
  }
  ~HostDevices() override {
    fakeNcclSetEnqueue(nullptr);
    fakeNcclSetCurrentDevice(nullptr, nullptr);
  }

  Stream new_stream(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queues_.push_back(std::make_unique<Queue>());
    return {BackendId::cuda, device, queues_.back().get()};
  }
  void put(Stream on, Step step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on.handle)
      static_cast<Queue*>(on.handle)->push_back(std::move(step));
    else
      step();
    run();
  }

  Event record(Stream on) override {
    auto mark = std::make_shared<bool>(false);
    put(on, [mark] { return *mark = true; });
    return mark;
  }
  void wait(Stream on, const Event& event) override {
    if (event) put(on, [event] { return *static_cast<const bool*>(event.get()); });
  }
  bool reached(const Event& event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    run();
    return !event || *static_cast<const bool*>(event.get());
  }
  bool is_captured(Stream) override { return false; }
  void synchronize(Stream on) override {
    const Event event = record(on);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!reached(event)) {
      if (std::chrono::steady_clock::now() > deadline) throw std::logic_error("a stream never ends");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  std::shared_ptr<void> make_current(int device) override {
    make_context(device);
    const int before = std::exchange(current(), device);
    return {nullptr, [before](void*) { current() = before; }};
  }
  // Devices that have a context.
  std::set<int> contexts() {
    const std::lock_guard<std::mutex> lock(contexts_mutex_);
    return contexts_;
  }
  static int& current() {
    static thread_local int device = -1;
    return device;
  }

  std::shared_ptr<void> staging(int64_t nbytes, const Streams& users) override { return host().staging(nbytes, users); }
  void keep(Stream on, std::shared_ptr<void> memory) override {
    put(on, [memory] { return memory != nullptr; });
  }
  void copy(const std::vector<CopyBlock>& blocks, Stream on) override {
    then(on, [blocks] { host().copy(blocks, {}); });
  }
  void sum_ranks(const std::vector<SumRanks>& calls, Stream on) override {
    then(on, [calls] { host().sum_ranks(calls, {}); });
  }
  // NCCL's backend asks for nothing else.
  void gather_rows(const GatherRows&, Stream) override { not_here(); }
  void pack(const Packing&, Stream) override { not_here(); }
  void unpack(const Packing&, Stream) override { not_here(); }
  void scale_cast(const ScaleCast&, Stream) override { not_here(); }
  void l2_norm(const L2Norm&, Stream) override { not_here(); }
  void sgd(const Sgd&, Stream) override { not_here(); }
  void adam(const Adam&, Stream) override { not_here(); }
  void lion(const Lion&, Stream) override { not_here(); }

 private:
  using Queue = std::deque<Step>;

  static DeviceOps& host() { return cpu::device_ops(); }
  [[noreturn]] static void not_here() { throw std::logic_error("not a part of this fake"); }
  static HostDevices*& of_hooks() {
    static HostDevices* devices = nullptr;
    return devices;
  }
  void make_context(int device) {
    const std::lock_guard<std::mutex> lock(contexts_mutex_);
    contexts_.insert(device);
  }
  static void enqueue(void* stream, bool (*step)(void*), void* argument) {
    of_hooks()->put({BackendId::cuda, 0, stream}, [step, argument] { return step(argument); });
  }
  void then(Stream on, std::function<void()> work) {
    put(on, [work = std::move(work)] {
      work();
      return true;
    });
  }
  // All streams, as far as they come.
  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& queue : queues_)
        while (!queue->empty() && queue->front()()) {
          queue->pop_front();
          moved = true;
        }
    }
  }

  std::mutex contexts_mutex_;
  std::set<int> contexts_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;
};

}  // namespace mgpu::fakes
