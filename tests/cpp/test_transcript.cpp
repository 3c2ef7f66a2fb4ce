#include "core/transcript.h"

#include <thread>
#include <vector>

#include "backends/cpu/cpu.h"
#include "check.h"

using namespace mgpu;

static void a_ring_of_two(DeviceOps& ops, float* one, float* other) {
  ops.sum_ranks({{{one, other}, {one}, 2, DType::f32, ReduceOp::sum, 1},
                 {{other + 2, one + 2}, {other + 2}, 2, DType::f32, ReduceOp::sum, 1}},
                {});
  ops.copy({{other, one, 1, 8, 0, 0}, {one + 2, other + 2, 1, 8, 0, 0}}, {});
}

int main() {
  WatchedOps ops(cpu::device_ops());
  float one[] = {1, 2, 3, 4}, other[] = {10, 20, 30, 40};

  open_transcript();
  a_ring_of_two(ops, one, other);
  const std::vector<Deed> deeds = close_transcript();
  for (int i = 0; i < 4; ++i) CHECK(one[i] == 11.0f * (i + 1) && other[i] == one[i]);

  CHECK(deeds.size() == 4);
  CHECK(deeds[0].sums && deeds[1].sums && !deeds[2].sums && !deeds[3].sums);
  CHECK(deeds[0].call == 0 && deeds[1].call == 0 && deeds[2].call == 1 && deeds[3].call == 1);
  CHECK((deeds[1].sources == std::vector<const void*>{other + 2, one + 2}));
  CHECK((deeds[1].targets == std::vector<const void*>{other + 2}));
  CHECK(deeds[2].sources[0] == one && deeds[2].targets[0] == other);
  for (const Deed& deed : deeds) CHECK(deed.nbytes == 8 && deed.begin_ns <= deed.end_ns && deed.on.device == kHost);
  CHECK(deeds[0].end_ns <= deeds[2].begin_ns);

  // Closed: nothing is written.  Open: another thread's work is its own.  Opened again: the old one is gone.
  a_ring_of_two(ops, one, other);
  CHECK(close_transcript().empty());
  open_transcript();
  std::thread([&] { a_ring_of_two(ops, one, other); }).join();
  CHECK(close_transcript().empty());
  open_transcript();
  a_ring_of_two(ops, one, other);
  open_transcript();
  CHECK(close_transcript().empty());

  // A strided copy counts the bytes of all its runs.
  float rows[] = {1, 2, 3, 4, 5, 6}, column[2];
  open_transcript();
  ops.copy({{column, rows, 2, 4, 4, 12}}, {});
  const std::vector<Deed> strided = close_transcript();
  CHECK(column[0] == 1 && column[1] == 4 && strided.size() == 1 && strided[0].nbytes == 8);
  return passed();
}
