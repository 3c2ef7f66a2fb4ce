// Plans: who gets which rows, which tensors travel together, who sends what to whom.  Integers in, integers out;
// a plan never sees a device, so it can be printed, tested exhaustively and drawn in a lesson.
#pragma once

#include <cstdint>
#include <vector>

namespace mgpu {

struct Chunk {
  int64_t begin;
  int64_t count;
};

// `count` rows over `ranks` ranks: sizes differ by at most one, the larger first.
std::vector<Chunk> chunk_plan(int64_t count, int ranks);

// `count` rows in the proportion of `shares` (positive weights), by the largest remainder; equal remainders go to the
// lower rank.  Every rank gets a row while there are enough; a rank with a share of less than one row takes the rest of
// it from all others in their proportion.  With fewer rows than ranks the first ranks get one each, so that the ranks
// that work are always the first ones.  Equal shares give chunk_plan's answer.
std::vector<Chunk> share_plan(int64_t count, const std::vector<double>& shares);

// Consecutive tensors travel together until their bytes pass `limit_nbytes` or their kind (dtype, device, ...: any
// integer) changes; a tensor larger than the limit travels alone.  Returns positions.
std::vector<std::vector<int>> bucket_plan(const std::vector<int64_t>& nbytes, const std::vector<int>& kinds,
                                          int64_t limit_nbytes);

// One hop of a schedule: rank `from` sends chunk `chunk` to rank `to`, which adds it to its own (reduce) or keeps it.
struct Hop {
  int from;
  int to;
  int chunk;
  bool reduce;
};
// The hops of one round touch different destinations, so they may run at once; rounds follow each other.
using Schedule = std::vector<std::vector<Hop>>;

// Ring all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009):
// ranks - 1 rounds in which chunk c is added up on its way from rank c to rank c - 1, then ranks - 1 rounds that
// hand the finished chunks on.  Each rank sends 2 (ranks - 1) / ranks of the buffer.  Chunk c is summed in the
// order c, c + 1, ..., c - 1 (modulo ranks).
Schedule ring_schedule(int ranks);

// Binomial tree: in round i rank r with bit i set sends all it has to r - 2^i, which adds it; then the same way back.
// One chunk (number 0).  The order is fixed by the tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
Schedule tree_schedule(int ranks);

}  // namespace mgpu
