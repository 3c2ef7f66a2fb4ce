#include <algorithm>
#include <cmath>
#include <set>

#include "check.h"
#include "core/error.h"
#include "core/plan.h"

using namespace mgpu;

static void check_cover(const std::vector<Chunk>& chunks, int64_t count) {
  int64_t next = 0;
  for (const Chunk& chunk : chunks) {
    CHECK(chunk.begin == next && chunk.count >= 0);
    next += chunk.count;
  }
  CHECK(next == count);
}

static void chunks() {
  for (int ranks = 1; ranks <= 17; ++ranks)
    for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{9}, int64_t{64}, int64_t{1} << 40}) {
      const auto plan = chunk_plan(count, ranks);
      CHECK(static_cast<int>(plan.size()) == ranks);
      check_cover(plan, count);
      CHECK(plan.front().count - plan.back().count <= 1);
      for (int rank = 1; rank < ranks; ++rank) CHECK(plan[rank - 1].count >= plan[rank].count);
    }
  CHECK_THROWS(InvalidArgument, "at least 1", chunk_plan(3, 0));
  CHECK_THROWS(InvalidArgument, "negative", chunk_plan(-1, 2));
}

static void shares() {
  const auto plan = share_plan(9, {2, 1});
  CHECK(plan[0].count == 6 && plan[1].count == 3);
  for (int ranks = 1; ranks <= 8; ++ranks)
    for (int64_t count = 0; count < 40; ++count) {
      const auto equal = share_plan(count, std::vector<double>(ranks, 0.3));
      const auto even = chunk_plan(count, ranks);
      for (int rank = 0; rank < ranks; ++rank) CHECK(equal[rank].count == even[rank].count);
    }
  const auto tiny = share_plan(5, {1000, 1, 1});
  CHECK(tiny[0].count == 3 && tiny[1].count == 1 && tiny[2].count == 1);
  const auto two = share_plan(20, {10, 10, .001, .001, .001, .001, .001, .001, .001, .001});
  CHECK(two[0].count == 6 && two[1].count == 6);
  for (int rank = 2; rank < 10; ++rank) CHECK(two[rank].count == 1);
  const auto huge = share_plan((int64_t{1} << 62) + 1, {1, 1e-9, 3});
  check_cover(huge, (int64_t{1} << 62) + 1);
  CHECK_THROWS(InvalidArgument, "above 0", share_plan(5, {1, 0}));
  CHECK_THROWS(InvalidArgument, "above 0", share_plan(5, {1, NAN}));
  CHECK_THROWS(InvalidArgument, "above 0", share_plan(5, {INFINITY, 1}));
  CHECK_THROWS(InvalidArgument, "sum", share_plan(5, {1e308, 1e308}));
  CHECK_THROWS(InvalidArgument, "at least 1", share_plan(5, {}));
}

static void buckets() {
  const auto plan = bucket_plan({4, 4, 4, 100, 1, 1}, {0, 0, 0, 0, 0, 1}, 10);
  CHECK(plan.size() == 5);
  CHECK((plan[0] == std::vector<int>{0, 1}) && (plan[1] == std::vector<int>{2}) && (plan[2] == std::vector<int>{3}));
  CHECK((plan[3] == std::vector<int>{4}) && (plan[4] == std::vector<int>{5}));
  CHECK(bucket_plan({}, {}, 10).empty());
  CHECK((bucket_plan({0, 0}, {0, 0}, 1).size() == 1));
  CHECK_THROWS(InvalidArgument, "one entry", bucket_plan({1}, {}, 10));
  CHECK_THROWS(InvalidArgument, "positive", bucket_plan({1}, {0}, 0));
}

// Runs a schedule on sets of ranks: after it, every rank must have every rank's part of every chunk, each once.
static void check_schedule(const Schedule& schedule, int ranks, int chunks) {
  std::vector<std::vector<std::multiset<int>>> held(ranks, std::vector<std::multiset<int>>(chunks));
  for (int rank = 0; rank < ranks; ++rank)
    for (auto& chunk : held[rank]) chunk.insert(rank);
  for (const auto& round : schedule) {
    const auto before = held;
    std::set<std::pair<int, int>> written, read;
    for (const Hop& hop : round) {
      CHECK(hop.from != hop.to);
      CHECK(written.insert({hop.to, hop.chunk}).second);
      read.insert({hop.from, hop.chunk});
      auto& mine = held[hop.to][hop.chunk];
      const auto& theirs = before[hop.from][hop.chunk];
      if (!hop.reduce) mine.clear();
      mine.insert(theirs.begin(), theirs.end());
    }
    for (const auto& chunk : written) CHECK(!read.count(chunk));  // hops of a round may run at once
  }
  for (const auto& rank : held)
    for (const auto& chunk : rank)
      for (int other = 0; other < ranks; ++other) CHECK(chunk.count(other) == 1);
}

static void schedules() {
  for (int ranks = 1; ranks <= 17; ++ranks) {
    check_schedule(ring_schedule(ranks), ranks, ranks);
    check_schedule(tree_schedule(ranks), ranks, 1);
    CHECK(static_cast<int>(ring_schedule(ranks).size()) == 2 * (ranks - 1));
    CHECK(static_cast<int>(tree_schedule(ranks).size()) == 2 * static_cast<int>(std::ceil(std::log2(ranks))));
  }
}

int main() {
  chunks();
  shares();
  buckets();
  schedules();
  return passed();
}
