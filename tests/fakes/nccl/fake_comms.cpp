// Communicators: how they begin, get their work onto streams, and end.
#include <algorithm>
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
  if (comm.polls_left-- > 0) return kInProgress;
  comm.ready = true;
  return kOk;
}

bool works_left(const Comm& comm) {
  return std::any_of(state().works.begin(), state().works.end(),
                     [&](const auto& work) { return work->comm == &comm && !all_done(*work); });
}

int ended(Comm& comm) {
  comm.gone = true;
  state().alive.erase(&comm);
  return kOk;
}

int init(Comm** out, int ranks, const std::string& id, int rank, const ncclConfig& config) {
  if (const int code = counted("CommInitRankConfig")) return code;
  if (rank < 0 || rank >= ranks) return fail(kArgument, "rank");
  if (config.magic != 0xcafebeef || config.blocking != 0) return fail(kArgument, "config");
  auto& clique = state().cliques[id];
  if (!clique) clique = std::make_shared<Clique>(Clique{ranks, std::vector<Comm*>(ranks), {}, {}, {}});
  clique->parts.resize(ranks);
  if (clique->ranks != ranks || clique->comms[rank]) return fail(kUsage, "the ranks do not agree about the team");
  auto comm = std::make_unique<Comm>();
  comm->clique = clique;
  comm->rank = rank;
  comm->device = state().current_device ? state().current_device() : rank;
  comm->init_code = state().init_failures.count(rank) ? state().init_failures[rank] : int{kOk};
  comm->polls_left = state().polls;
  *out = clique->comms[rank] = comm.get();
  state().alive.insert(comm.get());
  state().comms.push_back(std::move(comm));
  return kInProgress;
}

}  // namespace

API int ncclCommInitRankConfig(Comm** out, int ranks, ncclUniqueId id, int rank, ncclConfig* config) {
  const Lock lock(state().mutex);
  *out = nullptr;
  const int code = init(out, ranks, std::string(id.internal, sizeof id.internal), rank, *config);
  if (code != kInProgress) fail_group(code);
  return code;
}

API int ncclCommGetAsyncError(Comm* comm, int* code) {
  std::vector<std::unique_ptr<Work>> ready;
  {
    const Lock lock(state().mutex);
    if (!known(comm)) return fail(kArgument, "the communicator is gone");
    *code = comm->async;
    if (comm->async) return kOk;
    if (!comm->ready) {
      *code = state_of_init(*comm);
      return kOk;
    }
    if (comm->finalized && works_left(*comm)) *code = kInProgress;
    if (comm->pending.empty()) return kOk;
    *code = kInProgress;
    if (comm->polls_left-- > 0) return kOk;
    ready = std::move(comm->pending);
    comm->pending.clear();
  }
  for (auto& work : ready) put_on_stream(std::move(work));
  const Lock lock(state().mutex);
  for (size_t i = 0; i < ready.size(); ++i) close_device(*comm);
  *code = comm->async;
  return kOk;
}

API int ncclCommFinalize(Comm* comm) {
  const Lock lock(state().mutex);
  const int code = counted("CommFinalize");
  if (code != kOk) return code;
  if (!known(comm) || comm->finalized) return fail(kArgument, "finalized twice, or gone");
  comm->finalized = true;
  return kInProgress;
}

API int ncclCommDestroy(Comm* comm) {
  const Lock lock(state().mutex);
  const int code = counted("CommDestroy");
  if (code != kOk) return code;
  if (!known(comm)) return fail(kArgument, "destroyed twice");
  if (works_left(*comm)) return fail(kUsage, "destroyed while work is on its stream");
  return ended(*comm);
}

API int ncclCommAbort(Comm* comm) {
  const Lock lock(state().mutex);
  ++state().calls["CommAbort"];
  if (!known(comm)) return fail(kArgument, "aborted twice");
  for (size_t i = 0; i < comm->pending.size(); ++i) close_device(*comm);
  comm->pending.clear();
  ++state().aborted;
  drop_work(*comm);
  return ended(*comm);
}
