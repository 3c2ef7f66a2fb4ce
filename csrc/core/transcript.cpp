#include "core/transcript.h"

#include <chrono>
#include <utility>

namespace mgpu {
namespace {

struct Transcript {
  bool is_open = false;
  int calls = 0;
  std::vector<Deed> deeds;
};
thread_local Transcript transcript;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Runs the work, then writes down what `deeds_of` says that it was.
template <class Work, class DeedsOf>
void written(Stream on, const Work& work, const DeedsOf& deeds_of) {
  if (!transcript.is_open) return work();
  const int64_t begin = now_ns();
  work();
  const int64_t end = now_ns();
  for (Deed& deed : deeds_of()) {
    deed.call = transcript.calls;
    deed.on = on;
    deed.begin_ns = begin;
    deed.end_ns = end;
    transcript.deeds.push_back(std::move(deed));
  }
  ++transcript.calls;
}

std::vector<Deed> deeds_of_copies(const std::vector<CopyBlock>& blocks) {
  std::vector<Deed> deeds;
  for (const CopyBlock& each : blocks)
    deeds.push_back({false, {each.from}, {each.to}, each.rows * each.row_nbytes, 0, {}, 0, 0});
  return deeds;
}

std::vector<Deed> deeds_of_sums(const std::vector<SumRanks>& calls) {
  std::vector<Deed> deeds;
  for (const SumRanks& each : calls)
    deeds.push_back({true,
                     each.in,
                     {each.out.begin(), each.out.end()},
                     each.count * static_cast<int64_t>(itemsize(each.dtype)),
                     0,
                     {},
                     0,
                     0});
  return deeds;
}

}  // namespace

void open_transcript() { transcript = {true, 0, {}}; }

std::vector<Deed> close_transcript() { return std::exchange(transcript, {}).deeds; }

void WatchedOps::copy(const std::vector<CopyBlock>& blocks, Stream on) {
  written(on, [&] { ops_.copy(blocks, on); }, [&] { return deeds_of_copies(blocks); });
}

void WatchedOps::sum_ranks(const std::vector<SumRanks>& calls, Stream on) {
  written(on, [&] { ops_.sum_ranks(calls, on); }, [&] { return deeds_of_sums(calls); });
}

}  // namespace mgpu
