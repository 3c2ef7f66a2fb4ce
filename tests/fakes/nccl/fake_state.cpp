// The state, and what tests ask of it (fake_nccl.h).
#include "fakes/nccl/fake_state.h"

#include "fakes/nccl/fake_nccl.h"

namespace fake_nccl {
namespace {
thread_local std::string last;
}

State& state() {
  static State* all = new State;  // a stream may still run when the process ends
  return *all;
}

const char* last_error() { return last.c_str(); }

int fail(int code, const std::string& text) {
  last = "fake NCCL: " + text;
  return code;
}

int counted(const char* operation) {
  ++state().calls[operation];
  const auto found = state().failures.find(operation);
  if (found == state().failures.end() || --found->second.first > 0) return kOk;
  const int code = found->second.second;
  state().failures.erase(found);
  return fail(code, std::string("injected failure of ") + operation);
}

}  // namespace fake_nccl

using namespace fake_nccl;

API void fakeNcclSetEnqueue(void (*enqueue)(void*, bool (*)(void*), void*)) {
  const Lock lock(state().mutex);
  state().enqueue = enqueue;
}
API void fakeNcclSetCurrentDevice(int (*current_device)(), void (*set_device)(int)) {
  const Lock lock(state().mutex);
  state().current_device = current_device;
  state().set_device = set_device;
}
API void fakeNcclFail(const char* operation, int nth, int code) {
  const Lock lock(state().mutex);
  state().failures[operation] = {nth, code};
}
API void fakeNcclFailInit(int rank, int code) {
  const Lock lock(state().mutex);
  state().init_failures[rank] = code;
}
API void fakeNcclAsync(int rank, int code) {
  const Lock lock(state().mutex);
  for (Comm* comm : state().alive)
    if (comm->rank == rank) comm->async = code;
}
API void fakeNcclHold(int rank, bool on) {
  const Lock lock(state().mutex);
  state().held[rank] = on;
}
API void fakeNcclBlock(const char* operation, bool on) {
  const Lock lock(state().mutex);
  if (on)
    state().blocked.insert(operation);
  else
    state().blocked.erase(operation);
}
API void fakeNcclSetRounds(int rounds) {
  const Lock lock(state().mutex);
  state().rounds = rounds;
}
API void fakeNcclSetTimeout(int milliseconds) {
  const Lock lock(state().mutex);
  state().timeout = std::chrono::milliseconds(milliseconds);
}
API long fakeNcclCalls(const char* operation) {
  const Lock lock(state().mutex);
  return state().calls[operation];
}
API int fakeNcclAlive() {
  const Lock lock(state().mutex);
  return static_cast<int>(state().alive.size());
}
API int fakeNcclP2pDisabled() {
  const Lock lock(state().mutex);
  return state().p2p_disabled;
}
API int fakeNcclAborted() {
  const Lock lock(state().mutex);
  return state().aborted;
}
API int fakeNcclDepth() { return group_depth(); }
API void fakeNcclReset() {
  const Lock lock(state().mutex);
  state().failures.clear();
  state().init_failures.clear();
  state().held.clear();
  state().blocked.clear();
  state().calls.clear();
  state().aborted = 0;
  state().rounds = 0;
  state().timeout = std::chrono::seconds(20);
}
