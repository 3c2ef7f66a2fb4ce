// How a team calls NCCL: in groups, from the launcher's thread, each waited for with a limit.
#include <atomic>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "backends/nccl/group.h"
#include "backends/nccl/team.h"
#include "core/error.h"
#include "core/launch_window.h"

namespace mgpu::nccl {
namespace {

// A device that cannot be made current has failed; its communicators end all the same.
std::shared_ptr<void> current_or_none(DeviceOps& ops, int device) try {
  return ops.make_current(device);
} catch (const std::exception&) {
  return nullptr;
}

}  // namespace

Team::Calls Team::calls() const { return {api(), ops_, ranks_}; }

Team::Done Team::Calls::group(std::vector<Handle>& handles, const Call& call,
                              const std::function<void()>& before_end) const try {
  const auto current = current_or_none(ops, ranks[0].device);
  Group group(api);
  for (size_t index = 0; index < handles.size(); ++index)
    if (!group.add(index, call(index, handles[index]))) break;
  if (before_end) before_end();
  const Result result = group.end();
  return {result, group.failed(), group.dropped(), accepted(result) ? "" : last_error(api)};
} catch (const std::exception& error) {
  return {kUnhandledCudaError, -1, true, error.what()};
}

void Team::start_group(const std::string& what, const Streams& streams, Part part) {
  const Done done = run_group(what, true, [streams, part = std::move(part)](size_t index, Handle& handle) {
    return part(index, handle, streams[index].handle);
  });
  if (accepted(done.result)) return;
  // Usable only if the parts of the other ranks were dropped too, and NCCL itself sees it so.
  bool usable = done.result == kInvalidArgument && done.dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    usable = usable && state_ == State::usable && status_of(handles_).code == kSuccess;
  }
  const std::string text = text_of(what, done.failed, done.result, done.error);
  if (usable) throw NcclError(text + ". Nothing was started; the team is still usable", done.result);
  fail(text, done.result);
}

// The launcher makes the calls of a group, and the caller waits for it with a limit.  Only a group that launches is in
// the launch window: an init may wait for its peers for minutes.
Team::Done Team::run_group(const std::string& what, bool launches, Call call) {
  const auto done = std::make_shared<Done>();
  const auto called = std::make_shared<std::atomic<bool>>(false);  // all of the group; its end may still block
  std::shared_ptr<std::vector<Handle>> handles;
  {
    const std::lock_guard<std::mutex> lock(mutex_);  // so that an abort waits for this call, or this call sees it
    require_usable();
    handles = std::make_shared<std::vector<Handle>>(handles_);
    launcher_->start([calls = calls(), launches, done, called, handles, call = std::move(call)] {
      InLaunchWindow window(launch_window(), std::defer_lock);
      if (launches) window.try_lock_for(kWindowLimit);
      *done = calls.group(*handles, call, [called] { called->store(true); });
    });
  }
  const bool ended = launcher_->wait_until(Clock::now() + limits_.init);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::usable && called->load()) handles_ = *handles;  // an init makes them
  }
  if (!ended) fail(late_text(what, limits_.init) + ": its peers did not come", kTimeout);
  return *done;
}

// Aborts communicators while the launcher may be inside NCCL with them.  Alone, ncclCommAbort frees a blocking
// communicator at once, while the launcher still uses it.  In a group it only sets the flags that end all waiting, on
// the device and on the host; then the launcher comes out, and the end of the group frees.  If the launcher never comes
// out, nothing is freed, and the thread that aborts waits on, alone.
void Team::abort_each(std::vector<Handle> handles) const try {
  const auto ended = std::make_shared<std::promise<void>>();
  const std::future<void> end = ended->get_future();
  std::thread([calls = calls(), handles, ended, launcher_ends = launcher_->waiting()]() mutable {
    const auto abort = [&](size_t, Handle handle) {
      if (handle) calls.api.CommAbort(handle);
      return kSuccess;
    };
    calls.group(handles, abort, launcher_ends);
    ended->set_value();
  }).detach();
  end.wait_for(limits_.close);
} catch (const std::system_error&) {  // the process can have no more threads: nothing is freed
}

// Resources go with the last communicator of a team, so it is all or none.  What is still in flight is aborted.
void Team::finalize(std::vector<Handle> handles, Clock::time_point deadline) {
  const auto each = [&](Result (*end)(Handle), Clock::time_point limit) {
    const auto done = std::make_shared<Done>();
    launcher_->start([calls = calls(), done, handles, end]() mutable {
      *done = calls.group(handles, [end](size_t, Handle handle) { return end(handle); });
    });
    return launcher_->wait_until(limit) && accepted(done->result);
  };
  const bool ready = launcher_->wait_until(deadline) && Clock::now() < deadline;
  if (!ready || !each(api().CommFinalize, deadline)) return abort_each(handles);
  each(api().CommDestroy, deadline + limits_.close);
}

}  // namespace mgpu::nccl
