#include "core/op_log.h"

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
  LoggingDeviceOps ops(cpu::device_ops());
  float one[] = {1, 2, 3, 4}, other[] = {10, 20, 30, 40};

  open_op_log();
  a_ring_of_two(ops, one, other);
  const std::vector<OpRecord> records = close_op_log();
  for (int i = 0; i < 4; ++i) CHECK(one[i] == 11.0f * (i + 1) && other[i] == one[i]);

  CHECK(records.size() == 4);
  CHECK(records[0].is_sum && records[1].is_sum && !records[2].is_sum && !records[3].is_sum);
  CHECK(records[0].call == 0 && records[1].call == 0 && records[2].call == 1 && records[3].call == 1);
  CHECK((records[1].sources == std::vector<const void*>{other + 2, one + 2}));
  CHECK((records[1].targets == std::vector<const void*>{other + 2}));
  CHECK(records[2].sources[0] == one && records[2].targets[0] == other);
  for (const OpRecord& record : records)
    CHECK(record.nbytes == 8 && record.begin_ns <= record.end_ns && record.stream.on_host());
  CHECK(records[0].end_ns <= records[2].begin_ns);

  // Closed: nothing is written.  Open: another thread's work is its own.  Opened again: the old one is gone.
  a_ring_of_two(ops, one, other);
  CHECK(close_op_log().empty());
  open_op_log();
  std::thread([&] { a_ring_of_two(ops, one, other); }).join();
  CHECK(close_op_log().empty());
  open_op_log();
  a_ring_of_two(ops, one, other);
  open_op_log();
  CHECK(close_op_log().empty());

  // A strided copy counts the bytes of all its runs.
  float rows[] = {1, 2, 3, 4, 5, 6}, column[2];
  open_op_log();
  ops.copy({{column, rows, 2, 4, 4, 12}}, {});
  const std::vector<OpRecord> strided = close_op_log();
  CHECK(column[0] == 1 && column[1] == 4 && strided.size() == 1 && strided[0].nbytes == 8);
  return passed();
}
