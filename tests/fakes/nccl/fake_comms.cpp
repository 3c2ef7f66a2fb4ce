// Communicators: how they begin, get their work onto streams, and end.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fakes/nccl/fake_state.h"

using namespace fake_nccl;

struct ncclConfig {
  size_t size;
  unsigned int magic, version;
  int blocking;
};

namespace {

bool step(void* work) {
  const Lock lock(state().mutex);
  auto& works = state().works;
  const auto found = std::find_if(works.begin(), works.end(), [&](const auto& each) { return each.get() == work; });
  if (!advance(**found)) return false;
  works.erase(found);
  return true;
}

// The lock is let go: a stream may run the work at once.
void put_on_stream(std::unique_ptr<Work> work) {
  Work* mine = work.get();
  void (*enqueue)(void*, bool (*)(void*), void*);
  {
    const Lock lock(state().mutex);
    enqueue = state().enqueue;
    register_work(*mine);
    state().works.push_back(std::move(work));
  }
  if (enqueue && mine->stream)
    enqueue(mine->stream, step, mine);
  else
    step(mine);
}

// All ranks are there, and on devices of their own.
int state_of_init(Comm& comm) {
  Clique& clique = *comm.clique;
  if (comm.init_code != kOk) return fail(comm.init_code, "injected failure of an init");
  const char* shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  for (const Comm* each : clique.comms)
    for (const Comm* other : clique.comms)
      if (each && other && each != other && each->device == other->device && !(shared && std::strcmp(shared, "1") == 0))
        return fail(kUsage, "two ranks on one device");
  for (const Comm* each : clique.comms)
    if (!each) return kInProgress;
  if (comm.rounds_left-- > 0) return kInProgress;
  comm.ready = true;
  return kOk;
}

// Blocks until `step`, which is asked with the lock held, is no longer in progress, or somebody aborts.
template <class Step>
int until(Comm& comm, const Step& step) {
  for (;; std::this_thread::sleep_for(std::chrono::microseconds(100))) {
    const Lock lock(state().mutex);
    if (comm.aborting) return fail(kInternalError, "aborted");
    if (const int code = step(); code != kInProgress) return code;
  }
}

bool works_left(const Comm& comm) {
  return std::any_of(state().works.begin(), state().works.end(),
                     [&](const auto& work) { return work->comm == &comm && !all_done(*work); });
}

// The real one prints at its first communicator, without flushing, and reads its variables once.
void begin_once() {
  if (state().p2p_disabled >= 0) return;
  const char* disabled = std::getenv("NCCL_P2P_DISABLE");
  state().p2p_disabled = disabled && std::strcmp(disabled, "1") == 0;
  if (std::getenv("NCCL_DEBUG")) std::printf("NCCL version 2.30.7+fake\n");
}

int init(Comm** out, int ranks, const std::string& id, int rank, const ncclConfig& config) {
  if (const int code = counted("CommInitRankConfig")) return code;
  begin_once();
  if (rank < 0 || rank >= ranks) return fail(kArgument, "rank");
  if (config.magic != 0xcafebeef || config.blocking != 1) return fail(kArgument, "config");
  auto& clique = state().cliques[id];
  if (!clique) clique = std::make_shared<Clique>(Clique{ranks, std::vector<Comm*>(ranks), {}, {}, {}});
  clique->parts.resize(ranks);
  if (clique->ranks != ranks || clique->comms[rank]) return fail(kUsage, "the ranks do not agree about the team");
  auto comm = std::make_unique<Comm>();
  comm->clique = clique;
  comm->rank = rank;
  comm->device = state().current_device ? state().current_device() : rank;
  comm->init_code = state().init_failures.count(rank) ? state().init_failures[rank] : int{kOk};
  comm->rounds_left = state().rounds;
  *out = clique->comms[rank] = comm.get();
  state().alive.insert(comm.get());
  state().comms.push_back(std::move(comm));
  return at_group_end(AtEnd::init, *out);
}

}  // namespace

namespace fake_nccl {

int finish_init(Comm& comm) {
  return until(comm, [&] { return state_of_init(comm); });
}

int finish_work(Comm& comm) {
  return until(comm, [&] { return works_left(comm) ? int{kInProgress} : int{kOk}; });
}

int launch(std::unique_ptr<Work> work) {
  Comm& comm = *work->comm;
  const int code = until(comm, [&] { return comm.rounds_left-- > 0 ? int{kInProgress} : int{kOk}; });
  if (code == kOk) put_on_stream(std::move(work));
  const Lock lock(state().mutex);
  close_device(comm);
  return code;
}

// The real one frees it: whoever is inside would read freed memory.
void end_comm(Comm& comm) {
  if (comm.inside > 0) {
    std::fprintf(stderr, "a communicator is freed while a thread is inside NCCL with it\n");
    std::abort();
  }
  drop_work(comm);
  comm.gone = true;
  state().alive.erase(&comm);
}

}  // namespace fake_nccl

API int ncclCommInitRankConfig(Comm** out, int ranks, ncclUniqueId id, int rank, ncclConfig* config) {
  const Lock lock(state().mutex);
  *out = nullptr;
  const int code = init(out, ranks, std::string(id.internal, sizeof id.internal), rank, *config);
  if (code != kOk) fail_group(code);
  return code;
}

API int ncclCommGetAsyncError(Comm* comm, int* code) {
  const Lock lock(state().mutex);
  ++state().calls["CommGetAsyncError"];
  if (!known(comm)) return fail(kArgument, "the communicator is gone");
  *code = comm->async;
  return kOk;
}

API int ncclCommFinalize(Comm* comm) {
  const Lock lock(state().mutex);
  const int code = counted("CommFinalize");
  if (code != kOk) return code;
  if (!known(comm) || comm->finalized) return fail(kArgument, "finalized twice, or gone");
  comm->finalized = true;
  return at_group_end(AtEnd::finalize, comm);
}

API int ncclCommDestroy(Comm* comm) {
  const Lock lock(state().mutex);
  const int code = counted("CommDestroy");
  if (code != kOk) return code;
  if (!known(comm)) return fail(kArgument, "destroyed twice");
  if (works_left(*comm)) return fail(kUsage, "destroyed while work is on its stream");
  return at_group_end(AtEnd::destroy, comm);
}

// At once all that waits in it gives up; it is freed at the end of the group.
API int ncclCommAbort(Comm* comm) {
  const Lock lock(state().mutex);
  ++state().calls["CommAbort"];
  if (!known(comm) || comm->aborting) return fail(kArgument, "aborted twice");
  comm->aborting = true;
  ++state().aborted;
  return at_group_end(AtEnd::abort, comm);
}
