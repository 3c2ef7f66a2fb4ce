// The worlds in which the conformance suites run: ranks in host memory, and ranks on the deferred device.  A world
// writes each rank's input on the rank's own stream, so that a collective that does not wait finds poison; and after
// the call it reads the result there and overwrites all that the rank owns at once, so that a collective that is not
// done with it finds poison too.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "backends/cpu/cpu.h"
#include "core/peer_collectives.h"
#include "core/transfer.h"
#include "fakes/deferred/deferred_device.h"

constexpr int64_t kSmallPiece = 64;  // bytes, so that a few elements already go by way of the host in pieces

class World {
 public:
  virtual ~World() = default;
  virtual mgpu::DeviceOps& ops() = 0;
  virtual mgpu::Collectives& collectives() = 0;
  virtual mgpu::Transfer& transfer() = 0;
  virtual const mgpu::Streams& streams() const = 0;
  virtual void* allocate(int rank, int64_t nbytes) = 0;
  virtual void then(mgpu::Stream on, std::function<void()> work) = 0;  // put on the stream
  virtual void finish() = 0;                                           // all streams, in some order

  int size() const { return static_cast<int>(streams().size()); }
  mgpu::Ranks ranks(bool merge = true) const { return {streams(), merge}; }
};

// Memory of one rank, of T, with a guard behind it.  What it shall hold is put on the stream; what it held when the
// stream came to `read` is in `seen` after finish().
template <class T>
class Memory {
 public:
  Memory(World& world, int rank, int64_t count)
      : world_(world), on_(world.streams()[rank]), count_(count), guard_(8 / sizeof(T) + 1) {
    data_ = static_cast<T*>(world.allocate(rank, (count + guard_) * sizeof(T)));
    std::memset(static_cast<void*>(data_), 0xEE, (count + guard_) * sizeof(T));
  }

  void fill(std::function<T(int64_t)> value) {
    world_.then(on_, [this, value] {
      for (int64_t i = 0; i < count_; ++i) data_[i] = value(i);
    });
  }
  void read_and_poison() {
    world_.then(on_, [this] {
      seen_.assign(data_, data_ + count_ + guard_);
      std::memset(static_cast<void*>(data_), 0xDD, count_ * sizeof(T));
    });
  }
  void poison() {
    world_.then(on_, [this] { std::memset(static_cast<void*>(data_), 0xDD, count_ * sizeof(T)); });
  }

  T* data() { return data_; }
  const std::vector<T>& seen() const { return seen_; }
  // Nothing was written behind the end.
  bool guarded() const {
    for (int64_t i = count_; i < count_ + guard_; ++i) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(&seen_[i]);
      for (size_t k = 0; k < sizeof(T); ++k)
        if (bytes[k] != 0xEE) return false;
    }
    return true;
  }

 private:
  World& world_;
  mgpu::Stream on_;
  int64_t count_, guard_;
  T* data_;
  std::vector<T> seen_;
};

class HostWorld final : public World {
 public:
  explicit HostWorld(int ranks)
      : streams_(ranks),
        collectives_(mgpu::cpu::device_ops(), reach),
        transfer_(mgpu::cpu::device_ops(), mgpu::cpu::device_ops(), reach) {}
  mgpu::DeviceOps& ops() override { return mgpu::cpu::device_ops(); }
  mgpu::Collectives& collectives() override { return collectives_; }
  mgpu::Transfer& transfer() override { return transfer_; }
  const mgpu::Streams& streams() const override { return streams_; }
  void* allocate(int, int64_t nbytes) override {
    memory_.push_back(std::make_unique<char[]>(nbytes));
    return memory_.back().get();
  }
  void then(mgpu::Stream, std::function<void()> work) override { work(); }
  void finish() override {}

 private:
  static bool reach(int, int) { return true; }
  mgpu::Streams streams_;
  mgpu::PeerCollectives collectives_;
  mgpu::Transfer transfer_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

// One rank per entry of `devices`, each with a stream of its own.
class DeferredWorld final : public World {
 public:
  DeferredWorld(uint64_t seed, const std::vector<int>& devices, bool peers_reach)
      : reach_([peers_reach](int one, int other) { return one == other || peers_reach; }),
        device_(seed, mgpu::cpu::device_ops(), reach_),
        collectives_(device_, reach_, kSmallPiece),
        transfer_(device_, mgpu::cpu::device_ops(), reach_, kSmallPiece),
        random_(seed) {
    for (int device : devices) streams_.push_back(device_.new_stream(device));
  }
  mgpu::DeviceOps& ops() override { return device_; }
  mgpu::fakes::DeferredDevice& device() { return device_; }
  mgpu::Collectives& collectives() override { return collectives_; }
  mgpu::Transfer& transfer() override { return transfer_; }
  const mgpu::Streams& streams() const override { return streams_; }
  void* allocate(int rank, int64_t nbytes) override { return device_.allocate(streams_[rank].device, nbytes); }
  void then(mgpu::Stream on, std::function<void()> work) override {
    if (on.on_host()) return work();
    device_.submit(on, [work = std::move(work)] {
      work();
      return true;
    });
  }
  void finish() override {
    mgpu::Streams order = streams_;
    std::shuffle(order.begin(), order.end(), random_);
    for (mgpu::Stream stream : order) device_.synchronize(stream);
  }

 private:
  mgpu::Reach reach_;
  mgpu::fakes::DeferredDevice device_;
  mgpu::PeerCollectives collectives_;
  mgpu::Transfer transfer_;
  mgpu::Streams streams_;
  std::mt19937_64 random_;
};
