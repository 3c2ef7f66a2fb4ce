// One suite per interface, for every backend: what collectives and transfers promise, in whole numbers, with order
// checked by poison (worlds.h).
#pragma once

#include <numeric>

#include "check.h"
#include "worlds.h"

namespace conformance {

using mgpu::Algorithm;
using mgpu::Buffer;
using mgpu::Buffers;
using mgpu::DType;
using mgpu::ReduceOp;

using Int = int32_t;
using Memories = std::vector<std::unique_ptr<Memory<Int>>>;

inline Int value(int rank, int64_t i) { return static_cast<Int>(i % 13 + 100 * rank); }
inline Int sum(int ranks, int64_t i) { return static_cast<Int>(ranks * (i % 13) + 100 * ranks * (ranks - 1) / 2); }

inline Memories memories(World& world, int64_t count) {
  Memories result;
  for (int rank = 0; rank < world.size(); ++rank) result.push_back(std::make_unique<Memory<Int>>(world, rank, count));
  return result;
}
inline Memories filled(World& world, int64_t count) {
  Memories result = memories(world, count);
  for (int rank = 0; rank < world.size(); ++rank) result[rank]->fill([rank](int64_t i) { return value(rank, i); });
  return result;
}
inline Buffers buffers(Memories& all, int64_t count) {
  Buffers result;
  for (auto& each : all) result.push_back({each->data(), count, DType::i32});
  return result;
}
inline void poison(Memories& all) {
  for (auto& each : all) each->poison();
}
// Reads and poisons each rank's memory as soon as its stream gets there, then runs everything.
inline void finish(World& world, Memories& results) {
  for (auto& each : results) each->read_and_poison();
  world.finish();
  for (auto& each : results) CHECK(each->guarded());
}

inline void all_reduce(World& world, int64_t count, Algorithm algorithm, bool in_place, bool merge) {
  Memories in = filled(world, count), other = memories(world, count);
  Memories& out = in_place ? in : other;
  world.collectives().all_reduce(buffers(in, count), buffers(out, count), ReduceOp::sum, algorithm, world.ranks(merge));
  if (!in_place) poison(in);
  finish(world, out);
  for (auto& each : out)
    for (int64_t i = 0; i < count; ++i) CHECK(each->seen()[i] == sum(world.size(), i));
}

inline void average(World& world, Algorithm algorithm, bool merge) {
  const int64_t count = 10;
  Memories all = memories(world, count);  // the sum is -ranks, less one: toward zero
  for (int rank = 0; rank < world.size(); ++rank) all[rank]->fill([rank](int64_t) { return rank ? -1 : -2; });
  world.collectives().all_reduce(buffers(all, count), buffers(all, count), ReduceOp::avg, algorithm,
                                 world.ranks(merge));
  finish(world, all);
  for (auto& each : all)
    for (int64_t i = 0; i < count; ++i) CHECK(each->seen()[i] == (world.size() == 1 ? -2 : -1));
}

inline void reduce(World& world, int64_t count, int root) {
  Memories in = filled(world, count), tiny = filled(world, 2);
  Memory<Int> total(world, root, count), total2(world, root, 2);
  Buffers some = buffers(tiny, 2);
  if (world.size() > 1) some[0].pointer = nullptr;  // rank 0 has nothing to add
  world.collectives().reduce(
      {{buffers(in, count), {total.data(), count, DType::i32}}, {some, {total2.data(), 2, DType::i32}}}, ReduceOp::sum,
      world.ranks(), world.streams()[root]);
  poison(in);
  poison(tiny);
  total.read_and_poison();
  total2.read_and_poison();
  world.finish();
  CHECK(total.guarded() && total2.guarded());
  for (int64_t i = 0; i < count; ++i) CHECK(total.seen()[i] == sum(world.size(), i));
  for (int64_t i = 0; i < 2; ++i)
    CHECK(total2.seen()[i] == sum(world.size(), i) - (world.size() > 1 ? value(0, i) : 0));
}

inline void broadcast(World& world, int64_t count, int root) {
  Memories one = filled(world, count), two = filled(world, 3), copies = memories(world, count),
           others = memories(world, 3);
  Buffers to = buffers(copies, count);
  to[root].pointer = one[root]->data();  // left alone
  world.collectives().broadcast(
      {{{one[root]->data(), count, DType::i32}, to}, {{two[root]->data(), 3, DType::i32}, buffers(others, 3)}},
      world.streams()[root], world.ranks());
  one[root]->read_and_poison();
  two[root]->poison();
  for (auto& each : others) each->read_and_poison();
  finish(world, copies);
  for (int rank = 0; rank < world.size(); ++rank) {
    Memory<Int>& copy = rank == root ? *one[root] : *copies[rank];
    for (int64_t i = 0; i < count; ++i) CHECK(copy.seen()[i] == value(root, i));
    for (int64_t i = 0; i < 3; ++i) CHECK(others[rank]->seen()[i] == value(root, i));
  }
}

inline void all_gather(World& world, int64_t count, bool in_place) {
  const int ranks = world.size();
  std::vector<int64_t> counts, begins{0};
  for (int rank = 0; rank < ranks; ++rank) {
    counts.push_back(count + rank % 2);
    begins.push_back(begins.back() + counts.back());
  }
  const int64_t whole = begins.back();
  Memories parts, wholes = memories(world, whole);
  Buffers in;
  for (int rank = 0; rank < ranks; ++rank) {
    parts.push_back(std::make_unique<Memory<Int>>(world, rank, counts[rank]));
    parts[rank]->fill([rank](int64_t i) { return value(rank, i); });
    Int* own = wholes[rank]->data() + begins[rank];
    if (in_place)
      world.then(world.streams()[rank], [rank, own, end = counts[rank]] {
        for (int64_t i = 0; i < end; ++i) own[i] = value(rank, i);
      });
    in.push_back({in_place ? own : parts[rank]->data(), counts[rank], DType::i32});
  }
  world.collectives().all_gather(in, buffers(wholes, whole), world.ranks());
  poison(parts);
  finish(world, wholes);
  for (auto& each : wholes)
    for (int rank = 0; rank < ranks; ++rank)
      for (int64_t i = 0; i < counts[rank]; ++i) CHECK(each->seen()[begins[rank] + i] == value(rank, i));
}

inline void reduce_scatter(World& world, int64_t count) {
  const int ranks = world.size();
  Memories in = filled(world, count * ranks), out = memories(world, count);
  world.collectives().reduce_scatter(buffers(in, count * ranks), buffers(out, count), ReduceOp::sum, world.ranks());
  poison(in);
  finish(world, out);
  for (int rank = 0; rank < ranks; ++rank)
    for (int64_t i = 0; i < count; ++i) CHECK(out[rank]->seen()[i] == sum(ranks, rank * count + i));
}

// Cuts [outer][rows][inner] numbers into one part per rank, adds one there, and joins them again.  The whole is of rank
// `at`'s device, or in host memory (-1).
inline void there_and_back(World& world, int64_t outer, const std::vector<int64_t>& rows, int64_t inner, int at) {
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0}), count = outer * all * inner;
  const auto number = [](int64_t i) { return static_cast<Int>(i * 31 + 7); };
  const bool host = at < 0;
  std::vector<Int> there(host ? count : 0), back(host ? count : 0);
  for (size_t i = 0; i < there.size(); ++i) there[i] = number(i);
  Memory<Int> whole(world, std::max(at, 0), count), again(world, std::max(at, 0), count);
  if (!host) whole.fill(number);
  const mgpu::Stream end = host ? mgpu::Stream{} : world.streams()[at];
  Memories parts;
  std::vector<mgpu::Part> pieces;
  for (int rank = 0; rank < world.size(); ++rank) {
    parts.push_back(std::make_unique<Memory<Int>>(world, rank, outer * rows[rank] * inner));
    pieces.push_back({parts[rank]->data(), rows[rank]});
  }
  const int64_t row_nbytes = inner * static_cast<int64_t>(sizeof(Int));
  world.transfer().scatter({host ? there.data() : whole.data(), outer, all, row_nbytes}, end, pieces, world.streams());
  if (host)
    std::fill(there.begin(), there.end(), -1);  // it may be freed now
  else
    whole.poison();
  std::vector<std::vector<Int>> cut(world.size());
  for (int rank = 0; rank < world.size(); ++rank)
    world.then(world.streams()[rank], [&, rank] {
      Int *begin = parts[rank]->data(), *end = begin + outer * rows[rank] * inner;
      cut[rank].assign(begin, end);
      for (Int* each = begin; each < end; ++each) ++*each;
    });
  world.transfer().gather(pieces, world.streams(), {host ? back.data() : again.data(), outer, all, row_nbytes}, end);
  if (host)
    for (int64_t i = 0; i < count; ++i) CHECK(back[i] == number(i) + 1);  // it is there now
  else
    again.read_and_poison();
  finish(world, parts);
  for (int64_t i = 0; i < count && !host; ++i) CHECK(again.seen()[i] == number(i) + 1);
  CHECK(host || again.guarded());
  int64_t start = 0;
  for (int rank = 0; rank < world.size(); ++rank) {
    for (int64_t o = 0; o < outer; ++o)
      for (int64_t i = 0; i < rows[rank] * inner; ++i)
        CHECK(cut[rank][o * rows[rank] * inner + i] == number((o * all + start) * inner + i));
    start += rows[rank];
  }
}

// What is put on any stream of a transfer afterwards finds its copies made: parts are read from the whole's stream, and
// the whole is read from each rank's.
inline void transfers_from_both_ends(World& world, int at) {
  const int ranks = world.size();
  const int64_t nbytes = sizeof(Int);
  Memory<Int> whole(world, at, ranks), again(world, at, ranks);
  whole.fill([](int64_t i) { return value(static_cast<int>(i), 7); });
  Memories parts = memories(world, 1);
  std::vector<mgpu::Part> pieces;
  for (auto& part : parts) pieces.push_back({part->data(), 1});
  const mgpu::Stream end = world.streams()[at];
  world.transfer().scatter({whole.data(), 1, ranks, nbytes}, end, pieces, world.streams());
  std::vector<Int> scattered;
  world.then(end, [&] {
    for (auto& part : parts) scattered.push_back(*part->data());
  });
  world.ops().synchronize(end);
  world.transfer().gather(pieces, world.streams(), {again.data(), 1, ranks, nbytes}, end);
  std::vector<std::vector<Int>> gathered(ranks);
  for (int rank = 0; rank < ranks; ++rank)
    world.then(world.streams()[rank], [&, rank] { gathered[rank].assign(again.data(), again.data() + ranks); });
  const int other = (at + 1) % ranks;
  world.ops().synchronize(world.streams()[other]);  // alone, so that nobody else's wait hides a missing one
  world.finish();
  for (int rank = 0; rank < ranks; ++rank) CHECK(scattered[rank] == value(rank, 7));
  for (const auto& seen : gathered)
    for (int rank = 0; rank < ranks; ++rank) CHECK(seen[rank] == value(rank, 7));
}

// What a bucket of gradients goes through: packed on each rank's stream, all-reduced, and unpacked where it came from.
inline void bucket(World& world, Algorithm algorithm) {
  const std::vector<int64_t> counts{3, 40, 1, 0, 17};
  const int64_t whole = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  Memories flats = memories(world, whole);
  std::vector<Memories> gradients(world.size());
  std::vector<mgpu::Packing> packings;
  for (int rank = 0; rank < world.size(); ++rank) {
    mgpu::Packing packing{{}, DType::i32, flats[rank]->data(), DType::i32, 1.0};
    int64_t begin = 0;
    for (int64_t count : counts) {
      gradients[rank].push_back(std::make_unique<Memory<Int>>(world, rank, count));
      gradients[rank].back()->fill([rank, begin](int64_t i) { return value(rank, begin + i); });
      packing.pieces.push_back({gradients[rank].back()->data(), begin, count});
      begin += count;
    }
    packings.push_back(packing);
    world.ops().pack(packing, world.streams()[rank]);
    for (auto& gradient : gradients[rank]) gradient->poison();
  }
  world.collectives().all_reduce(buffers(flats, whole), buffers(flats, whole), ReduceOp::sum, algorithm, world.ranks());
  for (int rank = 0; rank < world.size(); ++rank) {
    world.ops().unpack(packings[rank], world.streams()[rank]);
    for (auto& gradient : gradients[rank]) gradient->read_and_poison();
  }
  finish(world, flats);
  for (auto& of_rank : gradients) {
    int64_t begin = 0;
    for (size_t rank = 0; rank < counts.size(); begin += counts[rank++]) {
      CHECK(of_rank[rank]->guarded());
      for (int64_t i = 0; i < counts[rank]; ++i) CHECK(of_rank[rank]->seen()[i] == sum(world.size(), begin + i));
    }
  }
}

inline void collectives(const std::function<std::unique_ptr<World>()>& make, const std::vector<int64_t>& counts) {
  const auto in_new_world = [&](auto&& test, auto... arguments) {
    const std::unique_ptr<World> world = make();
    test(*world, arguments...);
  };
  for (int64_t count : counts)
    for (bool in_place : {true, false}) {
      for (Algorithm algorithm : {Algorithm::naive, Algorithm::direct, Algorithm::ring, Algorithm::tree})
        for (bool merge : {true, false}) in_new_world(all_reduce, count, algorithm, in_place, merge);
      in_new_world(all_gather, count, in_place);
    }
  for (Algorithm algorithm : {Algorithm::naive, Algorithm::direct, Algorithm::ring, Algorithm::tree})
    for (bool merge : {true, false}) in_new_world(average, algorithm, merge);
  for (Algorithm algorithm : {Algorithm::naive, Algorithm::direct, Algorithm::ring, Algorithm::tree})
    in_new_world(bucket, algorithm);
  const int last = make()->size() - 1;
  for (int64_t count : counts) {
    in_new_world(reduce_scatter, count);
    for (int root : {0, last}) {
      in_new_world(reduce, count, root);
      in_new_world(broadcast, count, root);
    }
  }
}

inline void transfers(const std::function<std::unique_ptr<World>()>& make) {
  const int ranks = make()->size();
  for (int at : {0, ranks - 1}) transfers_from_both_ends(*make(), at);
  std::vector<int64_t> even(ranks, 2), odd(ranks, 3);
  for (int rank = 0; rank < ranks; ++rank) odd[rank] = rank % 3;
  for (const auto& rows : {even, odd})
    for (int64_t outer : {int64_t{0}, int64_t{1}, int64_t{3}})
      for (int64_t inner : {int64_t{0}, int64_t{1}, int64_t{5}})
        for (int at : {-1, 0, ranks - 1}) there_and_back(*make(), outer, rows, inner, at);
}

}  // namespace conformance
