#include "core/transfer.h"

#include <numeric>
#include <string>

#include "core/buffers.h"
#include "core/error.h"
#include "core/mirrors.h"

namespace mgpu {
namespace {

void require_rows(const Layout& whole, const std::vector<Part>& parts, const Streams& on) {
  const int64_t rows = std::accumulate(parts.begin(), parts.end(), int64_t{0},
                                       [](int64_t sum, const Part& part) { return sum + part.rows; });
  require(rows == whole.rows, "the parts have " + std::to_string(rows) + " rows together, the whole tensor has " +
                                  std::to_string(whole.rows));
  require(parts.size() == on.size(),
          "one stream per part: " + std::to_string(parts.size()) + " parts, " + std::to_string(on.size()) + " streams");
}

// A part and its place in the whole: the same rectangle, dense on one side and with the whole's pitch on the other.
struct Rectangle {
  Stream rank;
  void* part;
  void* place;
  int64_t outer, run_nbytes, pitch;

  int64_t nbytes() const { return outer * run_nbytes; }
  CopyBlock into_dense(void* to) const { return {to, place, outer, run_nbytes, run_nbytes, pitch}; }
  CopyBlock from_dense(const void* from) const { return {place, from, outer, run_nbytes, pitch, run_nbytes}; }
};

// Of the parts that have bytes.
std::vector<Rectangle> rectangles(const Layout& whole, const std::vector<Part>& parts, const Streams& on) {
  require_rows(whole, parts, on);
  std::vector<Rectangle> result;
  char* place = static_cast<char*>(whole.pointer);
  const int64_t pitch = whole.rows * whole.inner_nbytes;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const int64_t run_nbytes = parts[rank].rows * whole.inner_nbytes;
    if (run_nbytes * whole.outer > 0)
      result.push_back({on[rank], parts[rank].pointer, place, whole.outer, run_nbytes, pitch});
    place += run_nbytes;
  }
  return result;
}

}  // namespace

bool Transfer::in_reach(Stream one, Stream other) const {
  if (one.device == other.device) return true;
  return one.device != kHost && other.device != kHost && reach_(one.device, other.device);
}

void Transfer::scatter(const Layout& whole, Stream from, const std::vector<Part>& parts, const Streams& on) {
  PerStream<CopyBlock> copies;
  for (const Rectangle& each : rectangles(whole, parts, on)) {
    if (in_reach(from, each.rank)) {
      copies.add(each.rank, each.into_dense(each.part));
      continue;
    }
    Mirrors mirrors(ops_, true, {from, each.rank});
    const Buffer staged = mirrors.room(each.nbytes(), DType::u8);
    ops_of(from).copy({each.into_dense(staged.pointer)}, from);
    if (from.device != kHost) order(ops_, from, each.rank);
    ops_.copy({plain_copy(each.part, staged.pointer, each.nbytes())}, each.rank);
  }
  for (const auto& [rank, blocks] : copies.all()) {
    order(ops_, from, rank);
    ops_.copy(blocks, rank);
  }
  for (const auto& [rank, blocks] : copies.all()) order(ops_, rank, from);
}

void Transfer::gather(const std::vector<Part>& parts, const Streams& on, const Layout& whole, Stream to) {
  PerStream<Rectangle> direct;
  Streams users = on;
  users.push_back(to);
  Mirrors mirrors(ops_, true, users);
  std::vector<std::pair<Rectangle, void*>> staged;
  for (const Rectangle& each : rectangles(whole, parts, on)) {
    if (in_reach(each.rank, to)) {
      direct.add(each.rank, each);
      continue;
    }
    staged.emplace_back(each, mirrors.room(each.nbytes(), DType::u8).pointer);
    ops_.copy({plain_copy(staged.back().second, each.part, each.nbytes())}, each.rank);
  }
  std::vector<CopyBlock> blocks;
  for (const auto& [rank, all] : direct.all()) {
    order(ops_, rank, to);
    for (const Rectangle& each : all) blocks.push_back(each.from_dense(each.part));
  }
  if (!blocks.empty()) ops_of(to).copy(blocks, to);
  for (const auto& [rank, all] : direct.all()) order(ops_, to, rank);
  for (const auto& [each, memory] : staged) {
    if (to.device == kHost)
      ops_.synchronize(each.rank);  // the host reads it now
    else
      order(ops_, each.rank, to);
    ops_of(to).copy({each.from_dense(memory)}, to);
  }
}

}  // namespace mgpu
