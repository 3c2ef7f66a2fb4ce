#include "backends/nccl/team.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "backends/nccl/group.h"
#include "backends/nccl/pause.h"
#include "core/error.h"

namespace mgpu::nccl {
namespace {

constexpr const char* kAborted = ". All communicators of the team were aborted: make a new team to go on";

std::string seconds(std::chrono::milliseconds time) {
  std::string text = std::to_string(time.count() / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  return text + (text.back() == '.' ? "0 s" : " s");
}

std::vector<RankDevice> sorted(std::vector<RankDevice> ranks) {
  std::sort(ranks.begin(), ranks.end(), [](const RankDevice& a, const RankDevice& b) { return a.rank < b.rank; });
  return ranks;
}

bool all_reached(DeviceOps& ops, const std::vector<Event>& events) {
  return std::all_of(events.begin(), events.end(), [&](const Event& event) { return ops.reached(event); });
}

}  // namespace

Team::Team(DeviceOps& ops, const Library& library, int world, const std::vector<RankDevice>& ranks,
           const Limits& limits)
    : ops_(ops), library_(library), world_(world), ranks_(sorted(ranks)), limits_(limits), process_(getpid()) {}

Team::~Team() {
  if (getpid() != process_) {  // the communicators and the launcher's thread are the parent's
    static_cast<void>(launcher_.release());
    return;
  }
  unwatch(*this);
  try {
    close();
    forget_launches(ops_, devices());
  } catch (const std::exception&) {  // a destructor cannot report it
  }
}

std::vector<int> Team::devices() const {
  std::vector<int> devices;
  for (const RankDevice& each : ranks_) devices.push_back(each.device);
  return devices;
}

std::string Team::text_of(const std::string& what, int index, Result code, const std::string& last) const {
  std::string text = what + " failed";
  if (index >= 0)
    text += " on rank " + std::to_string(ranks_[index].rank) + ", device " + std::to_string(ranks_[index].device);
  text += ": " + std::string(api().GetErrorString(code)) + " (NCCL error " + std::to_string(code) + ")";
  return last.empty() ? text : text + ": " + last;
}

std::string Team::late_text(const std::string& what, std::chrono::milliseconds limit) const {
  std::string ranks;
  for (const RankDevice& each : ranks_) ranks += (ranks.empty() ? "" : ", ") + std::to_string(each.rank);
  return what + " (ranks " + ranks + " of " + std::to_string(world_) + ") did not end within " + seconds(limit);
}

void Team::require_usable() const {
  if (state_ == State::failed) throw NcclError(failure_, failure_code_);
  require(state_ == State::usable, "the team was closed");
}

void Team::check() const {
  if (getpid() != process_)
    throw NcclError("the team belongs to the process that this one was forked from: make a new team here",
                    kInvalidUsage);
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
}

Team::Status Team::status_of(const std::vector<Handle>& handles) const {
  Status status{kSuccess, -1};
  for (size_t index = 0; index < handles.size(); ++index) {
    Result result = kSuccess;
    const Result asked = api().CommGetAsyncError(handles[index], &result);
    if (asked != kSuccess) result = asked;
    if (!accepted(result)) return {result, static_cast<int>(index)};
    if (result == kInProgress) status = {result, static_cast<int>(index)};
  }
  return status;
}

// The first thread to come takes the communicators, and no call is started after that.
void Team::abort(const std::string& reason, Result code) {
  if (getpid() != process_) return;  // the communicators are the parent's
  std::vector<Handle> handles;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != State::usable) return;
    failure_ = reason + kAborted;
    failure_code_ = code;
    state_ = State::failed;
    handles.swap(handles_);
    in_flight_.clear();
  }
  abort_each(handles);
}

void Team::fail(const std::string& message, Result code) {
  abort(message, code);
  check();
  throw NcclError(message, code);  // not reached: the team is aborted, or was closed meanwhile
}

void Team::launch(const std::string& what, const Streams& streams, Part part) {
  check();
  LaunchTurn turn(ops_, streams, Clock::now() + limits_.init);
  start_group(what, streams, std::move(part));
  fly(what, turn.launched());
}

void Team::fly(const std::string& what, std::vector<Event> events) {
  if (limits_.collective.count() <= 0) return;
  bool first;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_reached();
    first = in_flight_.empty();
    if (first) progress_ = Clock::now();
    in_flight_.push_back({what, std::move(events)});
  }
  if (first) wake_watchdog();
}

// Launches on the same devices end in their order, so the first is asked.
void Team::drop_reached() {
  while (!in_flight_.empty() && all_reached(ops_, in_flight_.front().events)) {
    in_flight_.pop_front();
    progress_ = Clock::now();
  }
}

bool Team::look() noexcept try {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock) return true;
  if (state_ != State::usable) return false;
  drop_reached();
  if (in_flight_.empty()) return false;
  const Status status = status_of(handles_);
  const std::string what = in_flight_.front().what;
  const bool late = Clock::now() - progress_ > limits_.collective;
  lock.unlock();
  if (!accepted(status.code))
    abort(text_of(what + ", while it ran,", status.index, status.code, last_error(api())), status.code);
  else if (late)
    abort(late_text(what, limits_.collective), kTimeout);
  return true;
} catch (const std::exception& error) {  // a device that cannot even say whether it is done
  try {
    abort(error.what(), kUnhandledCudaError);
  } catch (...) {
  }
  return false;
} catch (...) {
  return false;
}

void Team::wait(const Streams& streams) {
  check();
  std::vector<Event> events;
  for (const Stream& stream : streams) events.push_back(ops_.record(stream));
  const auto limit = limits_.collective.count() > 0 ? limits_.collective : Limits{}.collective;
  const auto deadline = Clock::now() + limit;
  for (Pause pause; !all_reached(ops_, events); pause.next()) {
    look();
    check();
    if (Clock::now() > deadline) fail(late_text("what is on the streams", limit), kTimeout);
  }
  look();
  check();
}

void Team::close() {
  if (getpid() != process_) return;
  const auto deadline = Clock::now() + limits_.close;
  std::vector<Handle> handles;
  std::deque<InFlight> in_flight;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::usable) state_ = State::closed;
    handles.swap(handles_);
    in_flight.swap(in_flight_);
  }
  for (Pause pause; !in_flight.empty() && Clock::now() < deadline; pause.next())
    if (all_reached(ops_, in_flight.back().events)) in_flight.clear();
  if (!handles.empty()) finalize(handles, deadline);
}

}  // namespace mgpu::nccl
