#include "core/plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "core/error.h"

namespace mgpu {
namespace {

std::vector<Chunk> chunks_of(const std::vector<int64_t>& counts) {
  std::vector<Chunk> chunks;
  int64_t begin = 0;
  for (int64_t count : counts) {
    chunks.push_back({begin, count});
    begin += count;
  }
  return chunks;
}

void require_ranks(int ranks) { require(ranks >= 1, "ranks must be at least 1, not " + std::to_string(ranks)); }

void require_count(int64_t count) { require(count >= 0, "count must not be negative: " + std::to_string(count)); }

// Adds the rounds in which, at distance `step`, each rank passes chunk (rank - round - shift) on to its neighbour.
void add_ring_rounds(Schedule& schedule, int ranks, int shift, bool reduce) {
  for (int round = 0; round < ranks - 1; ++round) {
    std::vector<Hop> hops;
    for (int rank = 0; rank < ranks; ++rank) {
      const int chunk = (rank - round - shift + 2 * ranks) % ranks;
      hops.push_back({rank, (rank + 1) % ranks, chunk, reduce});
    }
    schedule.push_back(hops);
  }
}

}  // namespace

std::vector<Chunk> chunk_plan(int64_t count, int ranks) {
  require_ranks(ranks);
  require_count(count);
  std::vector<int64_t> counts(ranks, count / ranks);
  for (int64_t rank = 0; rank < count % ranks; ++rank) ++counts[rank];
  return chunks_of(counts);
}

std::vector<Chunk> share_plan(int64_t count, const std::vector<double>& shares) {
  const auto ranks = static_cast<int64_t>(shares.size());
  require_ranks(static_cast<int>(ranks));
  require_count(count);
  double total = 0;
  for (double share : shares) {
    require(std::isfinite(share) && share > 0, "a share must be finite and above 0, not " + std::to_string(share));
    total += share;
  }
  require(std::isfinite(total), "the sum of the shares must be finite");
  if (count <= ranks) return chunk_plan(count, static_cast<int>(ranks));

  // A rank with a share of less than a row gets one row, and the others share the rest; that may be less than a row for
  // more of them.
  std::vector<int64_t> counts(ranks, 1);
  std::vector<int> open(ranks);
  std::iota(open.begin(), open.end(), 0);
  int64_t left = count;
  const auto exact = [&](int rank) { return static_cast<double>(left) * (shares[rank] / total); };
  for (;;) {
    std::vector<int> rest;
    std::copy_if(open.begin(), open.end(), std::back_inserter(rest), [&](int rank) { return exact(rank) >= 1; });
    if (rest.size() == open.size()) break;
    left -= static_cast<int64_t>(open.size() - rest.size());
    open = std::move(rest);
    total = 0;
    for (int rank : open) total += shares[rank];
  }

  // The rest by the largest remainder.
  std::vector<double> remainders(ranks);
  int64_t given = 0;
  for (int rank : open) {
    // Rounding may promise more than there is when counts pass 2^53: never give out more than is left.
    counts[rank] = std::min(left - given, static_cast<int64_t>(std::floor(exact(rank))));
    remainders[rank] = exact(rank) - static_cast<double>(counts[rank]);
    given += counts[rank];
  }
  std::stable_sort(open.begin(), open.end(), [&](int a, int b) { return remainders[a] > remainders[b]; });
  for (size_t i = 0; given < left; ++i, ++given) ++counts[open[i % open.size()]];
  return chunks_of(counts);
}

std::vector<std::vector<int>> bucket_plan(const std::vector<int64_t>& nbytes, const std::vector<int>& kinds,
                                          int64_t limit_nbytes) {
  require(nbytes.size() == kinds.size(), "nbytes and kinds must have one entry per tensor");
  require(limit_nbytes > 0, "the bucket limit must be positive: " + std::to_string(limit_nbytes));
  std::vector<std::vector<int>> buckets;
  int64_t filled = 0;
  for (size_t i = 0; i < nbytes.size(); ++i) {
    const bool same_kind = !buckets.empty() && kinds[buckets.back().back()] == kinds[i];
    if (!same_kind || filled + nbytes[i] > limit_nbytes) {
      buckets.emplace_back();
      filled = 0;
    }
    buckets.back().push_back(static_cast<int>(i));
    filled += nbytes[i];
  }
  return buckets;
}

Schedule ring_schedule(int ranks) {
  require_ranks(ranks);
  Schedule schedule;
  add_ring_rounds(schedule, ranks, 0, true);    // round t: rank r sends chunk r - t, and adds what it gets
  add_ring_rounds(schedule, ranks, -1, false);  // now rank r holds chunk r + 1 finished, and sends that one first
  return schedule;
}

Schedule tree_schedule(int ranks) {
  require_ranks(ranks);
  Schedule up;
  for (int distance = 1; distance < ranks; distance *= 2) {
    std::vector<Hop> hops;
    for (int to = 0; to + distance < ranks; to += 2 * distance) hops.push_back({to + distance, to, 0, true});
    up.push_back(hops);
  }
  Schedule schedule = up;
  for (auto round = up.rbegin(); round != up.rend(); ++round) {
    std::vector<Hop> hops;
    for (const Hop& hop : *round) hops.push_back({hop.to, hop.from, 0, false});
    schedule.push_back(hops);
  }
  return schedule;
}

}  // namespace mgpu
