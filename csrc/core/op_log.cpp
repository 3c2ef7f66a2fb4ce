#include "core/op_log.h"

#include <chrono>
#include <utility>

namespace mgpu {
namespace {

struct OpLog {
  bool is_open = false;
  int calls = 0;
  std::vector<OpRecord> records;
};
thread_local OpLog op_log;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Runs the work; where a log is open, adds the records that `records_of` returns.
template <class Work, class RecordsOf>
void logged(Stream stream, const Work& work, const RecordsOf& records_of) {
  if (!op_log.is_open) return work();
  const int64_t begin = now_ns();
  work();
  const int64_t end = now_ns();
  for (OpRecord& record : records_of()) {
    record.call = op_log.calls;
    record.stream = stream;
    record.begin_ns = begin;
    record.end_ns = end;
    op_log.records.push_back(std::move(record));
  }
  ++op_log.calls;
}

std::vector<OpRecord> records_of_copies(const std::vector<CopyBlock>& blocks) {
  std::vector<OpRecord> records;
  for (const CopyBlock& each : blocks)
    records.push_back({false, {each.from}, {each.to}, each.rows * each.row_nbytes, 0, {}, 0, 0});
  return records;
}

std::vector<OpRecord> records_of_sums(const std::vector<SumRanks>& calls) {
  std::vector<OpRecord> records;
  for (const SumRanks& each : calls) {
    const auto nbytes = each.count * static_cast<int64_t>(itemsize(each.dtype));
    records.push_back({true, each.in, {each.out.begin(), each.out.end()}, nbytes, 0, {}, 0, 0});
  }
  return records;
}

}  // namespace

void open_op_log() { op_log = {true, 0, {}}; }

std::vector<OpRecord> close_op_log() { return std::exchange(op_log, {}).records; }

void LoggingDeviceOps::copy(const std::vector<CopyBlock>& blocks, Stream on) {
  logged(on, [&] { ops_.copy(blocks, on); }, [&] { return records_of_copies(blocks); });
}

void LoggingDeviceOps::sum_ranks(const std::vector<SumRanks>& calls, Stream on) {
  logged(on, [&] { ops_.sum_ranks(calls, on); }, [&] { return records_of_sums(calls); });
}

}  // namespace mgpu
