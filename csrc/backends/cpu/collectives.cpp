// The collectives of ranks that live in host memory.  All buffers are in reach of every thread, so a schedule is run
// round by round, and the hops of a round in parallel.
#include <algorithm>
#include <cstring>

#include "backends/cpu/cpu.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/thread_pool.h"
#include "core/plan.h"

namespace mgpu::cpu {
namespace {

constexpr int64_t kGrain = 64 * 1024;  // elements: less is done by the caller alone

char* at(const Buffer& buffer, int64_t element) {
  return static_cast<char*>(buffer.pointer) + element * static_cast<int64_t>(itemsize(buffer.dtype));
}

void copy(const Buffer& to, const Buffer& from) {
  if (to.pointer == from.pointer) return;
  device_ops().copy({CopyBlock{to.pointer, from.pointer, 1, nbytes_of(from), 0, 0}});
}

std::vector<const void*> inputs_of(const Buffers& in) {
  std::vector<const void*> pointers;
  for (const Buffer& buffer : in) pointers.push_back(buffer.pointer);
  return pointers;
}
std::vector<void*> outputs_of(const Buffers& out) {
  std::vector<void*> pointers;
  for (const Buffer& buffer : out) pointers.push_back(buffer.pointer);
  return pointers;
}

int divisor_of(ReduceOp op, size_t ranks) { return op == ReduceOp::avg ? static_cast<int>(ranks) : 1; }

// Every output gets in[0] op in[1] op ..., in rank order: one pass over memory.
void reduce_to_all(const Buffers& in, const Buffers& out, ReduceOp op) {
  const auto from = inputs_of(in);
  const auto to = outputs_of(out);
  parallel_for(in[0].count, kGrain, [&](int64_t begin, int64_t end) {
    kernels().reduce({from.data(), static_cast<int>(from.size()), to.data(), static_cast<int>(to.size()), begin, end,
                      in[0].dtype, op, divisor_of(op, from.size())});
  });
}

// One hop on elements [begin, end) of its chunk: the receiver's own value comes first.
void run_hop(const Hop& hop, const Chunk& chunk, const Buffers& work, ReduceOp op, int divisor, int64_t begin,
             int64_t end) {
  void* to = at(work[hop.to], chunk.begin);
  const void* from = at(work[hop.from], chunk.begin);
  if (hop.reduce) {
    const void* in[] = {to, from};
    kernels().reduce({in, 2, &to, 1, begin, end, work[0].dtype, op, divisor});
    return;
  }
  const auto size = static_cast<int64_t>(itemsize(work[0].dtype));
  std::memcpy(static_cast<char*>(to) + begin * size, static_cast<const char*>(from) + begin * size,
              (end - begin) * size);
}

// Runs the schedule in place on `work`.  An average divides in the last round that adds, where each chunk is complete.
void run_schedule(const Schedule& schedule, const std::vector<Chunk>& chunks, const Buffers& work, ReduceOp op) {
  for (size_t round = 0; round < schedule.size(); ++round) {
    const auto& hops = schedule[round];
    const bool last_sum = round + 1 == schedule.size() || !schedule[round + 1][0].reduce;
    const int divisor = last_sum ? divisor_of(op, work.size()) : 1;
    std::vector<int64_t> counts;
    for (const Hop& hop : hops) counts.push_back(chunks[hop.chunk].count);
    parallel_pieces(counts, kGrain, [&](size_t i, int64_t begin, int64_t end) {
      run_hop(hops[i], chunks[hops[i].chunk], work, op, divisor, begin, end);
    });
  }
}

class CpuCollectives final : public Collectives {
 public:
  Algorithm choose(int64_t, int) const override { return Algorithm::direct; }

  void all_reduce(const Buffers& in, const Buffers& out, ReduceOp op, Algorithm algorithm) override {
    const int ranks = static_cast<int>(in.size());
    const int64_t count = in[0].count;
    switch (algorithm) {
      case Algorithm::naive:  // what one writes first: all into rank 0, then rank 0 to all
        reduce_to_all(in, {out[0]}, op);
        for (int rank = 1; rank < ranks; ++rank) copy(out[rank], out[0]);
        return;
      case Algorithm::ring:
        for (int rank = 0; rank < ranks; ++rank) copy(out[rank], in[rank]);
        return run_schedule(ring_schedule(ranks), chunk_plan(count, ranks), out, op);
      case Algorithm::tree:
        for (int rank = 0; rank < ranks; ++rank) copy(out[rank], in[rank]);
        return run_schedule(tree_schedule(ranks), {{0, count}}, out, op);
      case Algorithm::direct:
      case Algorithm::automatic:
        return reduce_to_all(in, out, op);
    }
  }

  void reduce(const std::vector<ReduceCall>& calls, ReduceOp op) override {
    std::vector<std::vector<const void*>> from;
    std::vector<int64_t> counts;
    for (const ReduceCall& call : calls) {
      from.push_back(inputs_of(call.in));
      counts.push_back(call.out.count);
    }
    parallel_pieces(counts, kGrain, [&](size_t i, int64_t begin, int64_t end) {
      const ReduceCall& call = calls[i];
      kernels().reduce({from[i].data(), static_cast<int>(from[i].size()), &call.out.pointer, 1, begin, end,
                        call.out.dtype, op, divisor_of(op, from[i].size())});
    });
  }

  void broadcast(const std::vector<BroadcastCall>& calls) override {
    std::vector<CopyBlock> blocks;
    for (const BroadcastCall& call : calls)
      for (const Buffer& out : call.out)
        if (out.pointer != call.in.pointer)
          blocks.push_back({out.pointer, call.in.pointer, 1, nbytes_of(call.in), 0, 0});
    device_ops().copy(blocks);
  }

  void all_gather(const Buffers& in, const Buffers& out) override {
    std::vector<CopyBlock> blocks;
    for (const Buffer& to : out) {
      int64_t place = 0;
      for (const Buffer& from : in) {
        if (at(to, place) != from.pointer) blocks.push_back({at(to, place), from.pointer, 1, nbytes_of(from), 0, 0});
        place += from.count;
      }
    }
    device_ops().copy(blocks);
  }

  void reduce_scatter(const Buffers& in, const Buffers& out, ReduceOp op) override {
    const auto from = inputs_of(in);
    const int64_t count = out[0].count;
    parallel_pieces(std::vector<int64_t>(in.size(), count), kGrain, [&](size_t rank, int64_t begin, int64_t end) {
      const int64_t offset = static_cast<int64_t>(rank) * count;
      void* to = at(out[rank], -offset);  // so that the element numbers of the inputs fit the output too
      kernels().reduce({from.data(), static_cast<int>(from.size()), &to, 1, offset + begin, offset + end, in[0].dtype,
                        op, divisor_of(op, in.size())});
    });
  }
};

}  // namespace

Collectives& collectives() {
  static CpuCollectives collectives;
  return collectives;
}

}  // namespace mgpu::cpu
