#include "core/peer_collectives.h"

#include <algorithm>

#include "core/buffers.h"
#include "core/error.h"
#include "core/host_staging.h"
#include "core/merged.h"

namespace mgpu {
namespace {

// How sums are finished: avg divides a complete sum by the number of ranks.
struct Summing {
  ReduceOp op;
  int divisor;
};
Summing summing_of(ReduceOp op, size_t ranks) { return {op, divisor_of(op, ranks)}; }

using Copies = PerStream<CopyBlock>;

void add_copy(Copies& copies, Stream on, const Buffer& to, const Buffer& from) {
  if (to.pointer != from.pointer && from.count) copies.add(on, plain_copy(to.pointer, from.pointer, nbytes_of(from)));
}

void run(DeviceOps& ops, const Copies& copies) {
  for (const auto& [stream, blocks] : copies.all()) ops.copy(blocks, stream);
}

void all_before(DeviceOps& ops, const Streams& first, Stream later) {
  for (const Stream& stream : distinct(first)) order(ops, stream, later);
}
void before_all(DeviceOps& ops, Stream first, const Streams& later) {
  for (const Stream& stream : distinct(later)) order(ops, first, stream);
}

Streams with(Streams streams, Stream other) {
  streams.push_back(other);
  return streams;
}

// The simplest algorithm: all into rank 0, then rank 0 to all.
void naive(DeviceOps& ops, const Buffers& in, const Buffers& out, Summing summing, const Streams& streams) {
  all_before(ops, streams, streams[0]);
  ops.sum_ranks({sum_of(in, {out[0]}, summing.op, summing.divisor)}, streams[0]);
  before_all(ops, streams[0], streams);
  Copies copies;
  for (size_t rank = 1; rank < out.size(); ++rank) add_copy(copies, streams[rank], out[rank], out[0]);
  run(ops, copies);
  all_before(ops, streams, streams[0]);  // rank 0's result is read until then
}

// Each stream adds up one slice of all ranks and writes it to all: every element is read once and written once a rank.
void direct(DeviceOps& ops, const Buffers& in, const Buffers& out, Summing summing, const Streams& streams) {
  const Streams working = distinct(streams);
  barrier(ops, working);  // the inputs are there, and nobody reads the outputs any more
  const auto chunks = chunk_plan(in[0].count, static_cast<int>(working.size()));
  for (size_t i = 0; i < working.size(); ++i)
    if (chunks[i].count)
      ops.sum_ranks({sum_of(slices(in, chunks[i]), slices(out, chunks[i]), summing.op, summing.divisor)}, working[i]);
  barrier(ops, working);  // the others' slices are there, and nobody reads the inputs any more
}

// One round: each receiver waits for what its sender did in the rounds before, and takes what it has.  A hop never
// overwrites what another hop of the round, or of a later one, still reads: a rank that gets a finished chunk has
// already handed its own part of it on, along the same path.
void run_round(DeviceOps& ops, const std::vector<Hop>& hops, const std::vector<Chunk>& chunks, const Buffers& work,
               Summing summing, const Streams& streams) {
  std::vector<Event> sent;
  for (const Hop& hop : hops) sent.push_back(ops.record(streams[hop.from]));
  PerStream<SumRanks> sums;
  Copies copies;
  for (size_t i = 0; i < hops.size(); ++i) {
    const Hop& hop = hops[i];
    const Stream on = streams[hop.to];
    const Buffer to = slice(work[hop.to], chunks[hop.chunk]), from = slice(work[hop.from], chunks[hop.chunk]);
    if (streams[hop.from] != on) ops.wait(on, sent[i]);
    if (hop.reduce && to.count)
      sums.add(on, sum_of({to, from}, {to}, summing.op, summing.divisor));
    else
      add_copy(copies, on, to, from);
  }
  for (const auto& [stream, calls] : sums.all()) ops.sum_ranks(calls, stream);
  run(ops, copies);
}

// Runs the schedule in place on `work`.  An average divides in the last round that adds, where each chunk is complete.
void run_schedule(DeviceOps& ops, const Schedule& schedule, const std::vector<Chunk>& chunks, const Buffers& work,
                  Summing summing, const Streams& streams) {
  for (size_t round = 0; round < schedule.size(); ++round) {
    const bool last_sum = round + 1 == schedule.size() || !schedule[round + 1][0].reduce;
    run_round(ops, schedule[round], chunks, work, {summing.op, last_sum ? summing.divisor : 1}, streams);
  }
  barrier(ops, distinct(streams));  // a neighbour may still read what its owner will overwrite
}

// An all-reduce in place, by a schedule.  Alone there is no hop, but there may be an average to take.
void run_in_place(DeviceOps& ops, Algorithm algorithm, const Buffers& work, Summing summing, const Streams& streams) {
  const int ranks = static_cast<int>(work.size());
  const int64_t count = work[0].count;
  if (ranks == 1 && summing.divisor > 1)
    return ops.sum_ranks({sum_of(work, work, summing.op, summing.divisor)}, streams[0]);
  if (algorithm == Algorithm::ring)
    return run_schedule(ops, ring_schedule(ranks), chunk_plan(count, ranks), work, summing, streams);
  run_schedule(ops, tree_schedule(ranks), {{0, count}}, work, summing, streams);
}

void copy_each(DeviceOps& ops, const Buffers& in, const Buffers& out, const Streams& streams) {
  Copies copies;
  for (size_t rank = 0; rank < in.size(); ++rank) add_copy(copies, streams[rank], out[rank], in[rank]);
  run(ops, copies);
}

// One copy of a broadcast: rank `to` takes what rank `from` has, or the root (-1).
struct CopyHop {
  int from_rank;
  Stream from;
  int to_rank;
  Stream to;
};

// All tensors of a batch, for hops that do not wait for each other.
void run_copy_hops(DeviceOps& ops, const std::vector<BroadcastCall>& calls, const std::vector<CopyHop>& hops) {
  Copies copies;
  for (const CopyHop& hop : hops) {
    order(ops, hop.from, hop.to);
    for (const BroadcastCall& call : calls)
      if (call.out[hop.to_rank].pointer != call.in.pointer)
        add_copy(copies, hop.to, call.out[hop.to_rank], hop.from_rank < 0 ? call.in : call.out[hop.from_rank]);
  }
  run(ops, copies);
}

// From the root to the first rank of every other device along a tree, then to the other ranks of each device.
std::vector<std::vector<CopyHop>> broadcast_rounds(Stream root, const Streams& streams) {
  std::vector<CopyHop> firsts{{-1, root, -1, root}};  // `to` is the first rank of each device, or the root
  std::vector<CopyHop> local;
  for (int rank = 0; rank < static_cast<int>(streams.size()); ++rank) {
    const auto here = std::find_if(firsts.begin(), firsts.end(),
                                   [&](const CopyHop& first) { return first.to.same_device(streams[rank]); });
    if (here == firsts.end())
      firsts.push_back({-1, root, rank, streams[rank]});
    else
      local.push_back({here->to_rank, here->to, rank, streams[rank]});
  }
  std::vector<std::vector<CopyHop>> rounds;
  for (const auto& round : tree_schedule(static_cast<int>(firsts.size()))) {
    rounds.emplace_back();
    for (const Hop& hop : round)
      if (!hop.reduce)
        rounds.back().push_back(
            {firsts[hop.from].to_rank, firsts[hop.from].to, firsts[hop.to].to_rank, firsts[hop.to].to});
  }
  rounds.push_back(local);
  return rounds;
}

std::vector<std::vector<CopyHop>> all_from_root(Stream root, const Streams& streams) {
  std::vector<CopyHop> hops;
  for (int rank = 0; rank < static_cast<int>(streams.size()); ++rank) hops.push_back({-1, root, rank, streams[rank]});
  return {hops};
}

// The same calls from copies of the sources.  A copy that is the source itself is still left alone.
std::vector<BroadcastCall> staged_sources(StagedCopies& staging, std::vector<BroadcastCall> calls, Stream root) {
  Buffers sources;
  for (const BroadcastCall& call : calls) sources.push_back(call.in);
  const Buffers copies = staging.of_all(sources, root);
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].in = copies[i];
    for (Buffer& out : calls[i].out)
      if (out.pointer == sources[i].pointer) out.pointer = copies[i].pointer;
  }
  return calls;
}

// The inputs of a batch of sums, or copies of them: one copy of all that a rank has.
std::vector<Buffers> inputs_of(StagedCopies& staging, const std::vector<ReduceCall>& calls, const Streams& streams) {
  std::vector<Buffers> inputs(calls.size(), Buffers(streams.size()));
  for (size_t rank = 0; rank < streams.size(); ++rank) {
    Buffers of_rank;
    for (const ReduceCall& call : calls) of_rank.push_back(call.in[rank]);
    of_rank = staging.of_all(of_rank, streams[rank]);
    for (size_t i = 0; i < calls.size(); ++i) inputs[i][rank] = of_rank[i];
  }
  return inputs;
}

// Each call's sum of the inputs that have memory, into its output.
std::vector<SumRanks> sums_of(const std::vector<ReduceCall>& calls, const std::vector<Buffers>& inputs, ReduceOp op) {
  std::vector<SumRanks> sums;
  for (size_t i = 0; i < calls.size(); ++i) {
    Buffers present;
    for (const Buffer& buffer : inputs[i])
      if (buffer.pointer) present.push_back(buffer);
    sums.push_back(sum_of(present, {calls[i].out}, op, summing_of(op, present.size()).divisor));
  }
  return sums;
}

// Adds the parts that `from` has of a gathered tensor, from element `begin` of each part on.
void add_parts(Copies& copies, Stream on, const Buffer& whole, const Buffers& in, const Buffers& from, int64_t begin) {
  int64_t first = 0;
  for (size_t part = 0; part < in.size(); ++part) {
    if (at(whole, first) != in[part].pointer)
      add_copy(copies, on, slice(whole, {first + begin, from[part].count}), from[part]);
    first += in[part].count;
  }
}

void all_reduce_in_reach(DeviceOps& ops, const Buffers& in, const Buffers& out, Summing summing, Algorithm algorithm,
                         const Ranks& ranks) {
  const Streams& streams = ranks.streams;
  if (algorithm == Algorithm::naive) return naive(ops, in, out, summing, streams);
  if (algorithm == Algorithm::direct || algorithm == Algorithm::automatic)
    return direct(ops, in, out, summing, streams);
  const auto among = [&](const Buffers& work, const Streams& on) { run_in_place(ops, algorithm, work, summing, on); };
  if (ranks.merge_shared_devices && share_devices(streams))
    return merged_all_reduce(ops, in, out, summing.op, streams, among);
  copy_each(ops, in, out, streams);
  among(out, streams);
}

// The same between copies in host memory, a piece at a time.  Algorithms in rank order write one result, which all
// ranks copy.
void all_reduce_through_host(DeviceOps& ops, const Buffers& in, const Buffers& out, Summing summing,
                             Algorithm algorithm, const Ranks& ranks, int64_t piece_nbytes) {
  const Streams& streams = ranks.streams;
  const bool scheduled = algorithm == Algorithm::ring || algorithm == Algorithm::tree;
  const int64_t step = piece_count(piece_nbytes, in.size() + (scheduled ? in.size() : 1), in[0].dtype);
  for (int64_t begin = 0; begin < in[0].count; begin += step) {
    const Chunk piece{begin, std::min(step, in[0].count - begin)};
    StagedCopies staging(ops, true, streams);
    const Buffers from = staging.of(slices(in, piece), streams);
    Buffers results{staging.allocate(piece.count, in[0].dtype)};
    while (scheduled && results.size() < from.size()) results.push_back(staging.allocate(piece.count, in[0].dtype));
    all_reduce_in_reach(ops, from, results, summing, algorithm, {streams, false});
    Copies copies;
    for (size_t rank = 0; rank < out.size(); ++rank)
      add_copy(copies, streams[rank], slice(out[rank], piece), results[scheduled ? rank : 0]);
    run(ops, copies);
  }
}

}  // namespace

void PeerCollectives::all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, Algorithm algorithm,
                                 const Ranks& ranks) {
  if (algorithm == Algorithm::nccl) throw BackendUnavailable("nccl works between GPUs, by a team of its own");
  if (algorithm == Algorithm::push)
    throw BackendUnavailable("push works between GPUs that reach each other's memory, by a team of its own");
  const Summing summing = summing_of(op, in.size());
  if (in_reach(reach_, ranks.streams)) return all_reduce_in_reach(ops_, in, out, summing, algorithm, ranks);
  all_reduce_through_host(ops_, in, out, summing, algorithm, ranks, piece_nbytes_);
}

void PeerCollectives::reduce(const std::vector<ReduceCall>& calls, ReduceOp op, const Ranks& ranks, Stream root) {
  const Streams all = with(ranks.streams, root);
  const bool staged = !in_reach(reach_, all);
  for (const auto& piece : pieces_of(calls, staged ? piece_nbytes_ : kOnePiece, ranks.streams.size())) {
    StagedCopies staging(ops_, staged, all);
    const auto inputs = inputs_of(staging, piece, ranks.streams);
    all_before(ops_, ranks.streams, root);
    ops_.sum_ranks(sums_of(piece, inputs, op), root);
  }
  before_all(ops_, root, ranks.streams);  // until then the inputs are read
}

void PeerCollectives::broadcast(const std::vector<BroadcastCall>& calls, Stream root, const Ranks& ranks) {
  const Streams all = with(ranks.streams, root);
  const bool staged = !in_reach(reach_, all);
  const auto rounds = staged ? all_from_root(root, ranks.streams) : broadcast_rounds(root, ranks.streams);
  for (const auto& piece : pieces_of(calls, staged ? piece_nbytes_ : kOnePiece, 1)) {
    StagedCopies staging(ops_, staged, all);
    const auto sources = staged_sources(staging, piece, root);
    for (const auto& round : rounds) run_copy_hops(ops_, sources, round);
  }
  // Only now, so that no copy waits for another rank's copy: until then the memory of a hop's source is read.
  for (const auto& round : rounds)
    for (const CopyHop& hop : round) order(ops_, hop.to, hop.from);
}

void PeerCollectives::all_gather(const Buffers& in, const Buffers& out, const Ranks& ranks) {
  const Streams& streams = ranks.streams;
  const bool staged = !in_reach(reach_, streams);
  const int64_t step = piece_count(staged ? piece_nbytes_ : kOnePiece, in.size(), in[0].dtype);
  int64_t most = 0;
  for (const Buffer& part : in) most = std::max(most, part.count);
  for (int64_t begin = 0; begin < most; begin += step) {
    StagedCopies staging(ops_, staged, streams);
    Buffers from;
    for (size_t rank = 0; rank < in.size(); ++rank) {
      const Chunk piece{begin, std::clamp<int64_t>(in[rank].count - begin, 0, step)};
      from.push_back(staging.of(slice(in[rank], piece), streams[rank]));
    }
    barrier(ops_, distinct(streams));
    Copies copies;
    for (size_t rank = 0; rank < out.size(); ++rank) add_parts(copies, streams[rank], out[rank], in, from, begin);
    run(ops_, copies);
  }
  barrier(ops_, distinct(streams));
}

void PeerCollectives::reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op, const Ranks& ranks) {
  const Streams& streams = ranks.streams;
  const size_t chunks = out.size();
  const int64_t count = out[0].count;
  const bool staged = !in_reach(reach_, streams);
  const int64_t step = piece_count(staged ? piece_nbytes_ : kOnePiece, in.size() * chunks, in[0].dtype);
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t piece = std::min(step, count - begin);
    std::vector<ReduceCall> calls;  // one for each rank's chunk
    for (size_t rank = 0; rank < chunks; ++rank)
      calls.push_back(
          {slices(in, {static_cast<int64_t>(rank) * count + begin, piece}), slice(out[rank], {begin, piece})});
    StagedCopies staging(ops_, staged, streams);
    const auto sums = sums_of(calls, inputs_of(staging, calls, streams), op);
    barrier(ops_, distinct(streams));
    PerStream<SumRanks> work;
    for (size_t rank = 0; rank < chunks; ++rank) work.add(streams[rank], sums[rank]);
    for (const auto& [stream, all] : work.all()) ops_.sum_ranks(all, stream);
  }
  barrier(ops_, distinct(streams));
}

}  // namespace mgpu
