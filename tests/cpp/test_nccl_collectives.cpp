// Every collective of the nccl backend over the fake libnccl: all dtypes and ops with small whole numbers that are
// exact, ranks on devices of their own and sharing some, in place and out of place; teams in one process and in parts.
#include <algorithm>
#include <thread>

#include "check.h"
#include "core/error.h"
#include "fakes/nccl/nccl_world.h"

using namespace mgpu;
using namespace mgpu::fakes;

static const std::vector<std::vector<int>> kLayouts{
    {0}, {0, 1}, {1, 0}, {0, 1, 2}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 0}, {0, 0, 1, 1}, {2, 0, 1, 1, 0}};
static const DType kDTypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64, DType::u8};
static const ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max};

// Sums stay below 256 (bfloat16), products are powers of two, averages are whole.
static double value(ReduceOp op, size_t ranks, size_t rank, int64_t i) {
  if (op == ReduceOp::prod) return 1 + static_cast<double>((i + static_cast<int64_t>(rank)) % 2);
  if (op == ReduceOp::avg)
    return static_cast<double>(ranks) * static_cast<double>((i + static_cast<int64_t>(rank)) % 3);
  return static_cast<double>(i % 7) + 3 * static_cast<double>(rank);
}
static double expected(ReduceOp op, size_t ranks, int64_t i, DType dtype) {
  double result = value(op, ranks, 0, i);
  for (size_t rank = 1; rank < ranks; ++rank) {
    const double next = value(op, ranks, rank, i);
    if (op == ReduceOp::prod) result *= next;
    if (op == ReduceOp::sum || op == ReduceOp::avg) result += next;
    if (op == ReduceOp::min) result = std::min(result, next);
    if (op == ReduceOp::max) result = std::max(result, next);
  }
  if (op == ReduceOp::avg) result /= static_cast<double>(ranks);
  return dtype == DType::u8 ? static_cast<double>(static_cast<int64_t>(result) % 256) : result;
}

static void all_reduce(NcclWorld& world, DType dtype, ReduceOp op, int64_t count, bool in_place) {
  const size_t ranks = world.size();
  Memories in(ranks, dtype, count, [&](size_t rank, int64_t i) { return value(op, ranks, rank, i); });
  Memories other(ranks, dtype, count);
  Memories& out = in_place ? in : other;
  world.collectives->all_reduce(in.buffers(), out.buffers(), op, Algorithm::nccl, world.ranks());
  world.finish();
  for (const Numbers& each : out.all) {
    bool same = each.guarded();
    for (int64_t i = 0; i < count; ++i) same = same && each.get(i) == expected(op, ranks, i, dtype);
    CHECK(same);
  }
}

// The sum is -ranks less one: toward zero, whichever way NCCL rounds.
static void integer_average(NcclWorld& world, DType dtype) {
  Memories all(world.size(), dtype, 5, [](size_t rank, int64_t) { return rank ? -1 : -2; });
  world.collectives->all_reduce(all.buffers(), all.buffers(), ReduceOp::avg, Algorithm::automatic, world.ranks());
  world.finish();
  for (const Numbers& each : all.all) CHECK(each.get(4) == (world.size() == 1 ? -2 : -1));
}

static void reduce(NcclWorld& world, ReduceOp op, int64_t count, size_t root) {
  const size_t ranks = world.size();
  const auto values = [&](size_t rank, int64_t i) { return value(op, ranks, rank, i); };
  Memories in(ranks, DType::f32, count, values), tiny(ranks, DType::f32, 2, values);
  Numbers out(DType::f32, count);
  const Stream on = world.devices->new_stream(world.streams[root].device);  // not the rank's own
  world.collectives->reduce({{in.buffers(), out.buffer()}, {tiny.buffers(), tiny.all[root].buffer()}}, op,
                            world.ranks(), on);
  world.team->wait({on});
  for (int64_t i = 0; i < count; ++i) CHECK(out.get(i) == expected(op, ranks, i, DType::f32));
  CHECK(tiny.all[root].get(1) == expected(op, ranks, 1, DType::f32));
  CHECK(out.guarded() && tiny.all[root].guarded());
}

// One of several ranks of a device may have nothing to add; a device without any cannot be summed by NCCL.
static void absent_ranks() {
  NcclWorld world({0, 0, 1});
  Memories in(3, DType::i32, 4, [](size_t rank, int64_t i) { return i + 10.0 * static_cast<double>(rank); });
  Numbers out(DType::i32, 4);
  Buffers some = in.buffers();
  some[0].pointer = nullptr;
  world.collectives->reduce({{some, out.buffer()}}, ReduceOp::avg, world.ranks(), world.streams[1]);
  world.finish();
  for (int64_t i = 0; i < 4; ++i) CHECK(out.get(i) == static_cast<double>((2 * i + 30) / 2));
  some = in.buffers();
  some[2].pointer = nullptr;
  CHECK_THROWS(BackendUnavailable, "rank 2 has nothing to add",
               (world.collectives->reduce({{some, out.buffer()}}, ReduceOp::sum, world.ranks(), world.streams[0]), 0));
}

static void broadcast(NcclWorld& world, int64_t count, size_t root) {
  const auto values = [&](size_t rank, int64_t i) { return value(ReduceOp::sum, world.size(), rank, i); };
  Memories from(world.size(), DType::u8, count, values), two(world.size(), DType::f64, 3, values);
  Memories to(world.size(), DType::u8, count), to_two(world.size(), DType::f64, 3);
  Buffers outs = to.buffers();
  outs[root] = from.all[root].buffer();  // the source itself
  world.collectives->broadcast({{from.all[root].buffer(), outs}, {two.all[root].buffer(), to_two.buffers()}},
                               world.streams[root], world.ranks());
  world.finish();
  for (size_t rank = 0; rank < world.size(); ++rank) {
    const Numbers& mine = rank == root ? from.all[rank] : to.all[rank];
    for (int64_t i = 0; i < count; ++i) CHECK(mine.get(i) == values(root, i));
    for (int64_t i = 0; i < 3; ++i) CHECK(to_two.all[rank].get(i) == values(root, i));
    CHECK(mine.guarded() && to_two.all[rank].guarded());
  }
}

static void all_gather(NcclWorld& world, int64_t count, bool equal, bool in_place) {
  const size_t ranks = world.size();
  std::vector<int64_t> begins{0};
  for (size_t rank = 0; rank < ranks; ++rank)
    begins.push_back(begins.back() + (equal ? count : count + static_cast<int64_t>(rank % 2)));
  Memories parts(ranks, DType::i64, count + 1), wholes(ranks, DType::i64, begins.back());
  Buffers in;
  for (size_t rank = 0; rank < ranks; ++rank) {
    Numbers& mine = in_place ? wholes.all[rank] : parts.all[rank];
    const int64_t start = in_place ? begins[rank] : 0, own = begins[rank + 1] - begins[rank];
    for (int64_t i = 0; i < own; ++i) mine.set(start + i, value(ReduceOp::sum, ranks, rank, i));
    in.push_back({static_cast<int64_t*>(mine.buffer().pointer) + start, own, DType::i64});
  }
  world.collectives->all_gather(in, wholes.buffers(), world.ranks());
  world.finish();
  for (const Numbers& whole : wholes.all) {
    CHECK(whole.guarded());
    for (size_t rank = 0; rank < ranks; ++rank)
      for (int64_t i = begins[rank]; i < begins[rank + 1]; ++i)
        CHECK(whole.get(i) == value(ReduceOp::sum, ranks, rank, i - begins[rank]));
  }
}

static void reduce_scatter(NcclWorld& world, DType dtype, ReduceOp op, int64_t count) {
  const size_t ranks = world.size();
  Memories in(ranks, dtype, count * static_cast<int64_t>(ranks),
              [&](size_t rank, int64_t i) { return value(op, ranks, rank, i); });
  Memories out(ranks, dtype, count);
  world.collectives->reduce_scatter(in.buffers(), out.buffers(), op, world.ranks());
  world.finish();
  for (size_t rank = 0; rank < ranks; ++rank) {
    CHECK(out.all[rank].guarded());
    for (int64_t i = 0; i < count; ++i)
      CHECK(out.all[rank].get(i) == expected(op, ranks, static_cast<int64_t>(rank) * count + i, dtype));
  }
}

// Two messages from every rank to every rank, itself among them, listed by the receivers in another order.
static void exchange(NcclWorld& world, int64_t count) {
  const int ranks = static_cast<int>(world.size());
  Memories from(ranks * ranks * 2, DType::f32, count,
                [](size_t message, int64_t i) { return static_cast<double>(message) * 10 + static_cast<double>(i); });
  Memories to(ranks * ranks * 2, DType::f32, count);
  nccl::Messages sends, receives;
  for (int sender = 0; sender < ranks; ++sender)
    for (int receiver = ranks - 1; receiver >= 0; --receiver)
      for (int k = 0; k < 2; ++k)
        sends.push_back({sender, receiver, from.all[(sender * ranks + receiver) * 2 + k].buffer()});
  for (int receiver = 0; receiver < ranks; ++receiver)
    for (int sender = ranks - 1; sender >= 0; --sender)
      for (int k = 0; k < 2; ++k)
        receives.push_back({receiver, sender, to.all[(sender * ranks + receiver) * 2 + k].buffer()});
  world.collectives->exchange(sends, receives, world.streams);
  world.finish();
  for (size_t message = 0; message < to.all.size(); ++message) {
    CHECK(to.all[message].guarded());
    for (int64_t i = 0; i < count; ++i) CHECK(to.all[message].get(i) == from.all[message].get(i));
  }
}

static void all_of(const std::vector<int>& layout) {
  NcclWorld world(layout);
  for (bool in_place : {true, false}) {
    for (DType dtype : kDTypes)
      for (ReduceOp op : kOps)
        for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}}) all_reduce(world, dtype, op, count, in_place);
    for (DType dtype : {DType::f16, DType::i32}) all_reduce(world, dtype, ReduceOp::avg, 100'003, in_place);
    for (bool equal : {true, false})
      for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{20'001}})
        all_gather(world, count, equal, in_place);
  }
  for (DType dtype : {DType::i32, DType::i64}) integer_average(world, dtype);
  for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{20'001}}) {
    for (size_t root : {size_t{0}, world.size() - 1}) {
      for (ReduceOp op : kOps) reduce(world, op, count, root);
      broadcast(world, count, root);
    }
    for (ReduceOp op : kOps) reduce_scatter(world, op == ReduceOp::avg ? DType::i32 : DType::f32, op, count);
    exchange(world, count % 1000);
  }
}

// Ranks 0 and 1 of one team in a thread each, as they are in two processes.
static void rank_alone(const std::shared_ptr<HostDevices>& devices, const nccl::UniqueId& id, int rank) {
  const auto team = nccl::init(*devices, id, 2, {{rank, rank + 4}}, short_limits());
  nccl::NcclCollectives collectives(team);
  const Streams streams{devices->new_stream(rank + 4)};
  const auto numbers = [&](int64_t count, double first) {
    Numbers all(DType::i32, count);
    for (int64_t i = 0; i < count; ++i) all.set(i, first + static_cast<double>(i) + 10 * rank);
    return all;
  };
  Numbers sum = numbers(3, 0), average = numbers(3, -22), mine = numbers(2, 0), whole(DType::i32, 4);
  Numbers chunk(DType::i32, 2), ends = numbers(4, 0), total = numbers(3, 1), received(DType::i32, 2);
  collectives.all_reduce({sum.buffer()}, {sum.buffer()}, ReduceOp::sum, Algorithm::nccl, {streams, true});
  collectives.all_reduce({average.buffer()}, {average.buffer()}, ReduceOp::avg, Algorithm::nccl, {streams, true});
  collectives.all_gather({mine.buffer()}, {whole.buffer()}, {streams, true});
  collectives.reduce_scatter({ends.buffer()}, {chunk.buffer()}, ReduceOp::max, {streams, true});
  collectives.reduce_to(1, {total.buffer()}, rank == 1 ? total.buffer() : Buffer{}, ReduceOp::sum, streams);
  collectives.exchange({{0, 1 - rank, mine.buffer()}}, {{0, 1 - rank, received.buffer()}}, streams);
  Numbers copy = numbers(3, 5);
  collectives.broadcast_from(1, {copy.buffer()}, streams);
  team->wait(streams);
  for (int64_t i = 0; i < 3; ++i) {
    CHECK(sum.get(i) == static_cast<double>(2 * i + 10) && copy.get(i) == static_cast<double>(i + 15));
    CHECK(average.get(i) == static_cast<double>((2 * i - 34) / 2));
    CHECK(total.get(i) == static_cast<double>(rank ? 2 * i + 12 : i + 1));
  }
  CHECK(whole.get(1) == 1 && whole.get(2) == 10 && whole.get(3) == 11);
  CHECK(chunk.get(0) == 2 * rank + 10 && received.get(1) == 10 * (1 - rank) + 1);
  CHECK_THROWS(InvalidArgument, "needs the same count on every rank",
               (collectives.all_gather({mine.buffer()}, {sum.buffer()}, {streams, true}), 0));
}

static void in_parts() {
  const auto devices = std::make_shared<HostDevices>();
  const nccl::UniqueId id = nccl::unique_id();
  std::thread other([&] { rank_alone(devices, id, 1); });
  rank_alone(devices, id, 0);
  other.join();
}

int main() {
  nccl::open({FAKE_NCCL});
  for (const auto& layout : kLayouts) all_of(layout);
  absent_ranks();
  in_parts();
  CHECK(fakeNcclAlive() == 0 && fakeNcclAborted() == 0 && fakeNcclDepth() == 0);
  return passed();
}
