// A libnccl look-alike over host memory, for tests without a GPU; here: groups and operations.  What it is strict
// about, because the real one would hang or give wrong numbers:
//   * groups that are not ended, and two threads' groups that are open over one device;
//   * a call on a communicator that another thread is inside NCCL with, and freeing such a one (this ends the process);
//   * ranks that disagree; two ranks on one device; a communicator that is destroyed twice.
// Communicators are blocking, and all calls of one are made in groups.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fakes/nccl/fake_nccl.h"
#include "fakes/nccl/fake_state.h"

using namespace fake_nccl;

namespace {

// The group that the calling thread has open.
struct Group {
  int depth = 0;
  int code = kOk;
  std::vector<std::unique_ptr<Work>> works;
  std::vector<std::pair<AtEnd, Comm*>> comms;
};
thread_local Group group;

// The oldest work of a communicator in the open group.
Work& work_of(Comm* comm, void* stream) {
  for (auto& work : group.works)
    if (work->comm == comm) return *work;
  group.works.push_back(std::make_unique<Work>());
  group.works.back()->comm = comm;
  group.works.back()->stream = stream;
  const auto opened = state().opened.emplace(comm->device, Opened{std::this_thread::get_id(), 0}).first;
  ++opened->second.comms;
  return *group.works.back();
}

int refused(Comm* comm, const Part& part, void* stream) {
  if (!known(comm)) return fail(kArgument, "the communicator is not there, or gone");
  if (part.dtype < 0 || part.dtype > 9 || part.op < 0 || part.op > 4) return fail(kArgument, "dtype or op");
  if (part.root < 0 || part.root >= comm->clique->ranks) return fail(kArgument, "root or peer");
  const bool rooted = part.kind == Kind::broadcast || part.kind == Kind::reduce;
  const bool reads = part.kind != Kind::receive && !(part.kind == Kind::broadcast && comm->rank != part.root);
  const bool writes = part.kind != Kind::send && !(part.kind == Kind::reduce && comm->rank != part.root);
  if (part.count && ((reads && !part.in) || (writes && !part.out) || (rooted && !part.in && !part.out)))
    return fail(kArgument, "a buffer is null");
  if (!comm->ready || comm->inside > 0) return fail(kArgument, "another thread is inside NCCL with it");
  if (comm->async) return fail(comm->async, "the communicator has an asynchronous error");
  const auto opened = state().opened.find(comm->device);
  if (opened != state().opened.end() && opened->second.thread != std::this_thread::get_id())
    return fail(kUsage, "two threads have groups open over one device");
  for (auto& work : group.works)
    if (work->comm == comm && work->stream != stream) return fail(kUsage, "one communicator on two streams");
  return kOk;
}

void drop_group() {
  for (auto& work : group.works) close_device(*work->comm);
  group.works.clear();
  group.comms.clear();
}

// What blocks, without the lock.  The first failure.
int run_blocking(std::vector<std::unique_ptr<Work>>& works, const std::vector<std::pair<AtEnd, Comm*>>& comms) {
  int code = kOk;
  const auto keep_first = [&](int result) { code = code == kOk ? result : code; };
  for (const auto& [what, comm] : comms) {
    if (what == AtEnd::init) keep_first(finish_init(*comm));
    if (what == AtEnd::finalize) keep_first(finish_work(*comm));
  }
  for (auto& work : works) keep_first(launch(std::move(work)));
  return code;
}

int run_group() {
  auto works = std::exchange(group.works, {});
  const auto comms = std::exchange(group.comms, {});
  std::vector<Comm*> inside;
  for (const auto& work : works) inside.push_back(work->comm);
  for (const auto& [what, comm] : comms)
    if (what == AtEnd::init || what == AtEnd::finalize) inside.push_back(comm);
  {
    const Lock lock(state().mutex);
    for (const auto& work : works) work->comm->rounds_left = state().rounds;
    for (Comm* comm : inside) ++comm->inside;
  }
  const int code = run_blocking(works, comms);
  const Lock lock(state().mutex);
  for (Comm* comm : inside) --comm->inside;
  for (const auto& [what, comm] : comms)
    if (what == AtEnd::destroy || what == AtEnd::abort) end_comm(*comm);
  return code;
}

int post(const char* operation, Comm* comm, Part part, void* stream) {
  Lock lock(state().mutex);
  while (state().blocked.count(operation)) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    lock.lock();
  }
  int code = counted(operation);
  if (code == kOk && group.depth == 0) code = fail(kUsage, "not in a group");
  if (code == kOk) code = refused(comm, part, stream);
  if (code == kOk)
    work_of(comm, stream).parts.push_back(std::make_unique<Part>(part));
  else
    group.code = code;
  return code;
}

}  // namespace

API int ncclGetVersion(int* version) {
  const char* wanted = std::getenv("FAKE_NCCL_VERSION");
  *version = wanted ? std::atoi(wanted) : 23007;
  return kOk;
}
API const char* ncclGetErrorString(int code) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return code >= 0 && code < 8 ? kTexts[code] : "unknown result code";
}
API const char* ncclGetLastError(Comm*) { return last_error(); }
API int ncclGetUniqueId(ncclUniqueId* id) {
  const Lock lock(state().mutex);
  std::memset(id, 0, sizeof *id);
  const std::string text = "fake " + std::to_string(++state().ids);
  std::memcpy(id->internal, text.data(), text.size());
  return counted("GetUniqueId");
}

namespace fake_nccl {
void fail_group(int code) {
  if (group.depth) group.code = code;
}
int group_depth() { return group.depth; }
int at_group_end(AtEnd what, Comm* comm) {
  if (group.depth == 0) return fail(kUsage, "not in a group");
  group.comms.emplace_back(what, comm);
  return kOk;
}
}  // namespace fake_nccl

API int ncclGroupStart() {
  const Lock lock(state().mutex);
  const int code = counted("GroupStart");
  if (code == kOk) ++group.depth;
  return code;
}

// A group with a failed call is dropped whole.
API int ncclGroupEnd() {
  {
    const Lock lock(state().mutex);
    if (group.depth == 0) return fail(kUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0) return kOk;
    int code = counted("GroupEnd");
    if (group.code != kOk) code = group.code;
    group.code = kOk;
    if (code != kOk) {
      drop_group();
      return code;
    }
  }
  const DeviceSetBack device;
  return run_group();
}

API int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, Comm* comm, void* stream) {
  return post("AllReduce", comm, {Kind::all_reduce, in, out, count, dtype, op, 0}, stream);
}
API int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root, Comm* comm, void* stream) {
  return post("Broadcast", comm, {Kind::broadcast, in, out, count, dtype, 0, root}, stream);
}
API int ncclReduce(const void* in, void* out, size_t count, int dtype, int op, int root, Comm* comm, void* stream) {
  return post("Reduce", comm, {Kind::reduce, in, out, count, dtype, op, root}, stream);
}
API int ncclAllGather(const void* in, void* out, size_t count, int dtype, Comm* comm, void* stream) {
  return post("AllGather", comm, {Kind::all_gather, in, out, count, dtype, 0, 0}, stream);
}
API int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op, Comm* comm, void* stream) {
  return post("ReduceScatter", comm, {Kind::reduce_scatter, in, out, count, dtype, op, 0}, stream);
}
API int ncclSend(const void* in, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return post("Send", comm, {Kind::send, in, nullptr, count, dtype, 0, peer}, stream);
}
API int ncclRecv(void* out, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return post("Recv", comm, {Kind::receive, nullptr, out, count, dtype, 0, peer}, stream);
}
