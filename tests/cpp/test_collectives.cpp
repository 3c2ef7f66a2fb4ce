// Every collective and algorithm of the host's room on 1, 2, 3 and 8 ranks, with small whole numbers whose sums are
// exact; in place and out of place; small, and large enough to be shared by threads.
#include <numeric>

#include "check.h"
#include "core/checks.h"
#include "core/error.h"
#include "rooms.h"

using namespace mgpu;

using Memory = std::vector<std::vector<int32_t>>;

static Memory filled(int ranks, int64_t count) {
  Memory memory(ranks, std::vector<int32_t>(count + 1, 77));
  for (int rank = 0; rank < ranks; ++rank)
    for (int64_t i = 0; i < count; ++i) memory[rank][i] = static_cast<int32_t>(i % 13 + 100 * rank);
  return memory;
}
static Buffers buffers(Memory& memory, int64_t count) {
  Buffers result;
  for (auto& each : memory) result.push_back({each.data(), count, DType::i32});
  return result;
}
static int32_t sum(int ranks, int64_t i) {
  return static_cast<int32_t>(ranks * (i % 13) + 100 * ranks * (ranks - 1) / 2);
}

static void all_reduce(int ranks, int64_t count, Algorithm algorithm, bool in_place) {
  Memory in = filled(ranks, count), other(ranks, std::vector<int32_t>(count + 1, 77));
  Memory& out = in_place ? in : other;
  host_collectives().all_reduce(buffers(in, count), buffers(out, count), ReduceOp::sum, algorithm);
  for (auto& each : out) {
    for (int64_t i = 0; i < count; ++i) CHECK(each[i] == sum(ranks, i));
    CHECK(each[count] == 77);
  }
}

static void averages(int ranks, Algorithm algorithm) {
  Memory memory(ranks, std::vector<int32_t>(10, -1));  // the sum is -ranks, less one: toward zero
  memory[0].assign(10, -2);
  host_collectives().all_reduce(buffers(memory, 10), buffers(memory, 10), ReduceOp::avg, algorithm);
  for (auto& each : memory)
    for (int32_t value : each) CHECK(value == (ranks == 1 ? -2 : -1));
}

static void others(int ranks, int64_t count) {
  Memory in = filled(ranks, count * ranks), out(ranks, std::vector<int32_t>(count + 1, 77));
  host_collectives().reduce_scatter(buffers(in, count * ranks), buffers(out, count), ReduceOp::sum);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t i = 0; i < count; ++i) CHECK(out[rank][i] == sum(ranks, rank * count + i));
    CHECK(out[rank][count] == 77);
  }
  Memory parts = filled(ranks, count), wholes(ranks, std::vector<int32_t>(count * ranks + 1, 77));
  host_collectives().all_gather(buffers(parts, count), buffers(wholes, count * ranks));
  for (auto& whole : wholes) {
    for (int64_t i = 0; i < count * ranks; ++i) CHECK(whole[i] == parts[i / count][i % count]);
    CHECK(whole[count * ranks] == 77);
  }
  Memory copies(ranks, std::vector<int32_t>(count + 1, 77));
  host_collectives().broadcast({{buffers(parts, count)[0], buffers(copies, count)}});
  for (auto& copy : copies) CHECK(copy == parts[0] || count == 0);
  std::vector<int32_t> total(count + 1, 77), total2(3, 77);
  Memory tiny = filled(ranks, 2);
  host_collectives().reduce(
      {{buffers(parts, count), {total.data(), count, DType::i32}}, {buffers(tiny, 2), {total2.data(), 2, DType::i32}}},
      ReduceOp::sum);
  for (int64_t i = 0; i < count; ++i) CHECK(total[i] == sum(ranks, i));
  CHECK(total2[1] == sum(ranks, 1) && total2[2] == 77 && total[count] == 77);
}

static void refusals() {
  Memory memory = filled(2, 5);
  auto good = buffers(memory, 5), shorter = good;
  shorter[1].count = 4;
  CHECK_THROWS(InvalidArgument, "rank 1: expected 5 elements, got 4", (check_all_reduce(shorter, good), 0));
  auto mixed = good;
  mixed[1].dtype = DType::f32;
  CHECK_THROWS(InvalidArgument, "float32", (check_all_reduce(mixed, good), 0));
  auto absent = good;
  absent[0].pointer = nullptr;
  CHECK_THROWS(InvalidArgument, "no memory", (check_all_reduce(absent, good), 0));
  CHECK_THROWS(InvalidArgument, "at least one rank", (check_all_reduce({}, {}), 0));
  CHECK_THROWS(InvalidArgument, "2 inputs, 1 outputs", (check_all_reduce(good, {good[0]}), 0));
  CHECK_THROWS(InvalidArgument, "expected 10", (check_reduce_scatter(good, good), 0));
  CHECK_THROWS(InvalidArgument, "expected 10", (check_all_gather(good, good), 0));
  CHECK_THROWS(InvalidArgument, "rank 1", (check_broadcast({{good[0], shorter}}), 0));
  CHECK_THROWS(InvalidArgument, "at least one rank", (check_reduce({{{}, good[0]}}), 0));
}

int main() {
  set_host_threads(4);
  for (int ranks : {1, 2, 3, 8}) {
    for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{300'001}})
      for (Algorithm algorithm :
           {Algorithm::automatic, Algorithm::naive, Algorithm::direct, Algorithm::ring, Algorithm::tree})
        for (bool in_place : {true, false}) all_reduce(ranks, count, algorithm, in_place);
    for (Algorithm algorithm : {Algorithm::naive, Algorithm::direct, Algorithm::ring, Algorithm::tree})
      averages(ranks, algorithm);
    for (int64_t count : {int64_t{1}, int64_t{50'000}}) others(ranks, count);
  }
  refusals();
  return passed();
}
