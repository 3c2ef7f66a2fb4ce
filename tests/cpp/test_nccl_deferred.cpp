// The nccl backend on the deferred device, whose streams are as late as they may be: each collective waits for its
// ranks' streams, and theirs for it, or somebody reads poison.
#include "backends/nccl/nccl.h"
#include "conformance.h"
#include "fakes/nccl/fake_nccl.h"
#include "fakes/nccl/nccl_world.h"

static mgpu::fakes::DeferredDevice* device_of_hook = nullptr;

static void submit(void* stream, bool (*step)(void*), void* argument) {
  device_of_hook->submit({mgpu::BackendId::cuda, 0, stream}, [step, argument] { return step(argument); });
}

// Nobody watches: this device is one thread's.
static mgpu::nccl::Limits unwatched() {
  mgpu::nccl::Limits limits;
  limits.collective = std::chrono::milliseconds(0);
  return limits;
}

// A backend like any other, for the suite.
class NcclDeferredWorld final : public World {
 public:
  NcclDeferredWorld(uint64_t seed, const std::vector<int>& devices) : inner_(seed, devices, false) {
    device_of_hook = &inner_.device();
    fakeNcclSetEnqueue(submit);
    const auto ranks = mgpu::fakes::one_rank_per_device(devices);
    team_ = mgpu::nccl::init(ops(), mgpu::nccl::unique_id(), static_cast<int>(ranks.size()), ranks, unwatched());
    collectives_ = std::make_unique<mgpu::nccl::NcclCollectives>(team_);
  }
  mgpu::DeviceOps& ops() override { return inner_.ops(); }
  mgpu::Collectives& collectives() override { return *collectives_; }
  mgpu::Transfer& transfer() override { return inner_.transfer(); }
  const mgpu::Streams& streams() const override { return inner_.streams(); }
  void* allocate(int rank, int64_t nbytes) override { return inner_.allocate(rank, nbytes); }
  void then(mgpu::Stream on, std::function<void()> work) override { inner_.then(on, std::move(work)); }
  void finish() override {
    inner_.finish();
    for (const mgpu::Stream& stream : own_) ops().synchronize(stream);
  }
  // One that is no rank's.
  mgpu::Stream new_stream(int rank) {
    own_.push_back(inner_.device().new_stream(streams()[rank].device));
    return own_.back();
  }

 private:
  DeferredWorld inner_;
  mgpu::Streams own_;
  std::shared_ptr<mgpu::nccl::Team> team_;
  std::unique_ptr<mgpu::nccl::NcclCollectives> collectives_;
};

// The suite's own has a rank with nothing to add, which NCCL can do only where another rank shares its device.  Here
// the root is a stream of no rank: it says when the result may be written, and reads it.
static void reduce(NcclDeferredWorld& world, int64_t count, int root) {
  auto in = conformance::filled(world, count);
  std::vector<int32_t> seen(count);
  const mgpu::Stream on = world.new_stream(root);
  auto* total = static_cast<int32_t*>(world.allocate(root, count * 4));
  world.then(on, [=] { std::memset(total, 0xDD, count * 4); });  // it is still used there
  world.collectives().reduce({{conformance::buffers(in, count), {total, count, mgpu::DType::i32}}}, mgpu::ReduceOp::avg,
                             world.ranks(), on);
  conformance::poison(in);
  world.then(on, [&] { std::copy(total, total + count, seen.begin()); });
  world.then(on, [=] { std::memset(total, 0xDD, count * 4); });
  world.finish();
  for (int64_t i = 0; i < count; ++i) CHECK(seen[i] == conformance::sum(world.size(), i) / world.size());
}

// The source is written and overwritten by a stream of no rank.
static void broadcast(NcclDeferredWorld& world, int64_t count, int root) {
  auto copies = conformance::memories(world, count);
  const mgpu::Stream on = world.new_stream(root);
  auto* source = static_cast<int32_t*>(world.allocate(root, count * 4));
  world.then(on, [=] {
    for (int64_t i = 0; i < count; ++i) source[i] = conformance::value(root, i);
  });
  world.collectives().broadcast({{{source, count, mgpu::DType::i32}, conformance::buffers(copies, count)}}, on,
                                world.ranks());
  world.then(on, [=] { std::memset(source, 0xDD, count * 4); });
  conformance::finish(world, copies);
  for (auto& copy : copies)
    for (int64_t i = 0; i < count; ++i) CHECK(copy->seen()[i] == conformance::value(root, i));
}

// Rank r sends to rank r + 1, and receives from r - 1 into other memory.
static void exchange(World& world, int64_t count) {
  const int ranks = world.size();
  auto from = conformance::filled(world, count), to = conformance::memories(world, count);
  const auto sent = conformance::buffers(from, count), received = conformance::buffers(to, count);
  mgpu::nccl::Messages sends, receives;
  for (int rank = 0; rank < ranks; ++rank) {
    sends.push_back({rank, (rank + 1) % ranks, sent[rank]});
    receives.push_back({rank, (rank + ranks - 1) % ranks, received[rank]});
  }
  dynamic_cast<mgpu::nccl::NcclCollectives&>(world.collectives()).exchange(sends, receives, world.streams());
  conformance::poison(from);
  conformance::finish(world, to);
  for (int rank = 0; rank < ranks; ++rank)
    for (int64_t i = 0; i < count; ++i) CHECK(to[rank]->seen()[i] == conformance::value((rank + ranks - 1) % ranks, i));
}

// Two teams over the same devices, on streams that know nothing of each other: their launches still run one after the
// other, as NCCL wants of communicators that share a device.  The second reads what the first has written.
static void two_teams(uint64_t seed) {
  NcclDeferredWorld world(seed, {0, 1});
  const int64_t count = 9;
  const auto team = mgpu::nccl::init(world.ops(), mgpu::nccl::unique_id(), 2, {{0, 0}, {1, 1}}, unwatched());
  mgpu::nccl::NcclCollectives other(team);
  auto first = conformance::filled(world, count);
  mgpu::Streams streams{world.new_stream(0), world.new_stream(1)};
  mgpu::Buffers in = conformance::buffers(first, count), out;
  for (int rank : {0, 1}) out.push_back({world.allocate(rank, count * 4), count, mgpu::DType::i32});
  world.collectives().all_reduce(in, in, mgpu::ReduceOp::sum, mgpu::Algorithm::nccl, world.ranks());
  other.all_reduce(in, out, mgpu::ReduceOp::sum, mgpu::Algorithm::nccl, {streams, true});
  for (int rank : {1, 0}) world.ops().synchronize(streams[rank]);
  for (int rank : {0, 1})
    for (int64_t i = 0; i < count; ++i)
      CHECK(static_cast<int32_t*>(out[rank].pointer)[i] == 2 * conformance::sum(2, i));
  world.finish();
}

static void on(const std::vector<int>& devices, uint64_t seed, int64_t count) {
  const auto in_new_world = [&](auto&& test, auto... arguments) {
    NcclDeferredWorld world(seed, devices);
    test(world, arguments...);
  };
  for (bool in_place : {true, false}) {
    in_new_world(conformance::all_reduce, count, mgpu::Algorithm::nccl, in_place, true);
    in_new_world(conformance::all_gather, count, in_place);
  }
  in_new_world(conformance::average, mgpu::Algorithm::nccl, true);
  in_new_world(conformance::reduce_scatter, count);
  in_new_world(exchange, count);
  for (int root : {0, static_cast<int>(devices.size()) - 1}) {
    in_new_world(reduce, count, root);
    in_new_world(broadcast, count, root);
    in_new_world(conformance::broadcast, count, root);
    if (devices.size() > 1 && devices[1] == devices[0]) in_new_world(conformance::reduce, count, root);
  }
}

int main() {
  mgpu::nccl::open({FAKE_NCCL});
  for (uint64_t seed = 0; seed < 20; ++seed) {
    two_teams(seed);
    for (const auto& devices : std::vector<std::vector<int>>{
             {0}, {0, 1}, {1, 0}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 0, 0}, {0, 0, 1, 1}, {0, 1, 1, 0, 2}})
      for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{40}}) on(devices, seed, count);
  }
  CHECK(fakeNcclAborted() == 0);
  return passed();
}
