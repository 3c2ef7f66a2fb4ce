// What a backend can do to the memory of its devices, and who waits for whom.  Collectives and transfers are written
// against this interface, so the same code runs on every backend, and on the fakes of the tests.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/kernel_calls.h"
#include "core/types.h"

namespace mgpu {

// The backends of devices; the number is the index of the row in backends.cpp.
enum class BackendId : int { cpu, cuda };

// Whether the backend works in host memory: the host reads it by itself, and work is done when the call returns.
constexpr bool works_on_host(BackendId backend) {
  switch (backend) {
    case BackendId::cpu:
      return true;
    case BackendId::cuda:
      return false;
  }
  return false;
}

// A queue of work on a device: what is put on it runs in order, and later than the call returns (but see
// works_on_host).  The default is the host's stream.
struct Stream {
  BackendId backend = BackendId::cpu;
  int device = 0;          // index among the backend's devices
  void* handle = nullptr;  // the backend's: a cudaStream_t (null is CUDA's legacy default stream)

  bool on_host() const { return works_on_host(backend); }
  bool same_device(const Stream& other) const { return backend == other.backend && device == other.device; }
  bool operator==(const Stream& other) const { return same_device(other) && handle == other.handle; }
  bool operator!=(const Stream& other) const { return !(*this == other); }
};
using Streams = std::vector<Stream>;  // one entry per rank

// A point in a stream's work.  Null: a point that has been reached (the host's work always has).
using Event = std::shared_ptr<void>;

class DeviceOps {
 public:
  virtual ~DeviceOps() = default;

  // Order.  `record` names the point where the stream is now; what is put on `on` after `wait` runs after that point.
  virtual Event record(Stream on) = 0;
  virtual void wait(Stream on, const Event& event) = 0;
  virtual bool reached(const Event& event) = 0;
  virtual void synchronize(Stream on) = 0;  // the caller waits for all that is on it
  virtual bool is_captured(Stream on) = 0;  // what is put on it goes into a graph

  // Makes a device the calling thread's current one until the returned object is destroyed, for libraries that use the
  // current device.  The objects are destroyed in the reverse order.
  virtual std::shared_ptr<void> make_current(int device) = 0;

  // Returns host memory that the devices read and write by themselves, for work on the streams of `users`; the memory
  // is given out again after its last owner has released it.  `keep` is such an owner until what is on the stream now
  // has run.  Where much is in use the host waits for earlier work of `users`, but never while one of them is captured.
  virtual std::shared_ptr<void> staging(int64_t nbytes, const Streams& users) = 0;
  virtual void keep(Stream on, std::shared_ptr<void> memory) = 0;

  // Work.  The blocks' destinations do not overlap each other nor any source; nor do the outputs of sums.
  virtual void copy(const std::vector<CopyBlock>& blocks, Stream on) = 0;
  virtual void sum_ranks(const std::vector<SumRanks>& calls, Stream on) = 0;
  // Runs until the parts of all other ranks have sent their values, or to its limit.  Throws BackendUnavailable on a
  // backend without it.
  virtual void push_sum(const PushSum& call, Stream on);
  // An index outside [0, rows_count) is the caller's mistake: on the host nothing is written and InvalidArgument names
  // it; a device cannot report it in time and fills the row with NaN.
  virtual void gather_rows(const GatherRows& call, Stream on) = 0;
  virtual void pack(const Packing& call, Stream on) = 0;
  virtual void unpack(const Packing& call, Stream on) = 0;
  virtual void scale_cast(const ScaleCast& call, Stream on) = 0;
  virtual void l2_norm(const L2Norm& call, Stream on) = 0;
  virtual void sgd(const Sgd& call, Stream on) = 0;
  virtual void adam(const Adam& call, Stream on) = 0;
  virtual void lion(const Lion& call, Stream on) = 0;
};

// Whether work on `device` may read and write the memory of `peer`, of the same backend, and the other way round.
using Reach = std::function<bool(int device, int peer)>;

// Whether each stream's device reaches the memory of all the others.
bool in_reach(const Reach& reach, const Streams& streams);

// What is put on any of the streams afterwards runs after all that is on any of them now.
void barrier(DeviceOps& ops, const Streams& streams);
// What is put on `later` afterwards runs after all that is on `first` now.
void order(DeviceOps& ops, Stream first, Stream later);

}  // namespace mgpu
