// The communicators of this process's ranks of a team, and what became of them.
//
// All are made, used, aborted and closed together: NCCL leaves a communicator usable after an invalid argument only,
// and its peers would wait for one that is gone.  So after any other failure all are aborted, which also ends what is
// in flight; the call says so, and every later call raises the same error at once.
//
// NCCL is called by the launcher's thread, so the lock of a team is never held while anybody waits.  One team may be
// used by several threads; on each of its streams the work is in the order of the calls.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/nccl/launcher.h"
#include "backends/nccl/nccl_library.h"
#include "backends/nccl/watchdog.h"
#include "core/device_ops.h"
#include "core/launch_order.h"

namespace mgpu::nccl {

struct RankDevice {
  int rank;  // index in the team
  int device;
};

struct Limits {
  std::chrono::milliseconds init{std::chrono::minutes(10)};        // to meet the peers, and to get a launch on its way
  std::chrono::milliseconds collective{std::chrono::minutes(10)};  // without any progress; 0: nobody watches
  std::chrono::milliseconds close{std::chrono::seconds(10)};       // then an abort, which may take as long again
};

class Team final : public Watched {
 public:
  // `my_ranks`: those of this process, each on a device of its own; the other processes, or threads, give theirs at the
  // same time.  A mistake is InvalidArgument.  If one rank fails all are aborted.
  static std::shared_ptr<Team> init(DeviceOps& ops, const UniqueId& id, int world,
                                    const std::vector<RankDevice>& my_ranks, const Limits& limits);
  // Waits for what is in flight, up to the limit of `close`.
  ~Team() override;

  int world() const { return world_; }
  const std::vector<RankDevice>& ranks() const { return ranks_; }  // this process's, in their order
  bool whole() const { return static_cast<int>(ranks_.size()) == world_; }
  DeviceOps& ops() const { return ops_; }
  const Api& api() const { return library_.api; }

  // The part of communicator `index` (of ranks()) in a group.  Must not throw.  Owns what it uses: NCCL may block in it
  // until after `launch` has given up and thrown.
  using Part = std::function<Result(size_t index, Handle communicator, void* stream)>;
  // All parts in one group, that of ranks()[index] on streams[index]; returns when they are on the streams.  `what`
  // names it in messages.
  void launch(const std::string& what, const Streams& streams, Part part);

  // Throws NcclError once the team is aborted, and InvalidArgument once it is closed.
  void check() const;
  // Waits until what is on the streams has run; throws as soon as the team is aborted.
  void wait(const Streams& streams);
  // Aborts what is in flight on all devices.  Does nothing for a team that has failed already.
  void abort(const std::string& reason, Result code = kSuccess);
  void close();

  bool look() noexcept override;

 private:
  enum class State { usable, failed, closed };
  struct InFlight {
    std::string what;
    std::vector<Event> events;
  };
  struct Status {
    Result code;  // the first failure, otherwise in progress, otherwise success
    int index;
  };

  Team(DeviceOps& ops, const Library& library, int world, const std::vector<RankDevice>& ranks, const Limits& limits);
  void make_communicators(const UniqueId& id);
  struct Calls;
  struct Done {  // what became of a group
    Result result = kSuccess;
    int failed = -1;  // index of the communicator whose call failed; -1: the group as a whole
    bool dropped = false;
    std::string error;
  };
  using Call = std::function<Result(size_t index, Handle& communicator)>;
  Calls calls() const;
  void start_group(const std::string& what, const Streams& streams, Part part);
  Done run_group(const std::string& what, bool launches, Call call);
  void fly(const std::string& what, std::vector<Event> events);
  void finalize(std::vector<Handle> handles, Clock::time_point deadline);
  void abort_each(std::vector<Handle> handles) const;

  // With the lock held.
  void require_usable() const;
  Status status_of(const std::vector<Handle>& handles) const;
  void drop_reached();

  std::string text_of(const std::string& what, int index, Result code, const std::string& last) const;
  std::string late_text(const std::string& what, std::chrono::milliseconds limit) const;
  std::vector<int> devices() const;
  [[noreturn]] void fail(const std::string& message, Result code);

  DeviceOps& ops_;
  const Library& library_;
  const int world_;
  const std::vector<RankDevice> ranks_;
  const Limits limits_;
  const pid_t process_;
  std::unique_ptr<Launcher> launcher_ = std::make_unique<Launcher>();

  mutable std::mutex mutex_;
  State state_ = State::usable;
  std::vector<Handle> handles_;  // of ranks_; none once the team has ended
  std::string failure_;
  Result failure_code_ = kSuccess;
  std::deque<InFlight> in_flight_;
  Clock::time_point progress_;  // of what is in flight
};

// State of a call, which may outlive its team.
struct Team::Calls {
  const Api& api;
  DeviceOps& ops;
  std::vector<RankDevice> ranks;

  // Makes the calls of a group, in the calling thread.  NCCL sets the current device back to the one that it found; in
  // a thread without a context that would make one on GPU 0, so a device of the team is current meanwhile.
  Done group(std::vector<Handle>& handles, const Call& call, const std::function<void()>& before_end = {}) const;
};

}  // namespace mgpu::nccl
