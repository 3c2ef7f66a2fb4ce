#include "core/transfer.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <string>

#include "core/buffers.h"
#include "core/error.h"
#include "core/host_staging.h"

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

// A part and its address in the whole: the same rectangle, dense on one side and with the whole's pitch on the other.
struct Rectangle {
  Stream rank;
  void* part;
  void* in_whole;
  int64_t outer, run_nbytes, pitch;

  int64_t nbytes() const { return outer * run_nbytes; }
  Rectangle cut(int64_t run, int64_t runs, int64_t begin, int64_t width) const {
    char* from = static_cast<char*>(part) + run * run_nbytes + begin;
    return {rank, from, static_cast<char*>(in_whole) + run * pitch + begin, runs, width, pitch};
  }
  CopyBlock into_dense(void* to) const { return {to, in_whole, outer, run_nbytes, run_nbytes, pitch}; }
  CopyBlock from_dense(const void* from) const { return {in_whole, from, outer, run_nbytes, pitch, run_nbytes}; }
};

// The rectangles of the parts that have bytes.
std::vector<Rectangle> rectangles(const Layout& whole, const std::vector<Part>& parts, const Streams& on) {
  require_rows(whole, parts, on);
  std::vector<Rectangle> result;
  char* in_whole = static_cast<char*>(whole.pointer);
  const int64_t pitch = whole.rows * whole.inner_nbytes;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const int64_t run_nbytes = parts[rank].rows * whole.inner_nbytes;
    if (run_nbytes * whole.outer > 0)
      result.push_back({on[rank], parts[rank].pointer, in_whole, whole.outer, run_nbytes, pitch});
    in_whole += run_nbytes;
  }
  return result;
}

// Cuts rectangles into some of at most so many bytes, dense in the parts: whole runs, or pieces of one run.  Those of
// different ranks take turns, so that all of the ranks' copies are under way.
std::vector<Rectangle> pieces_of(const std::vector<Rectangle>& all, int64_t piece_nbytes) {
  std::vector<std::pair<int64_t, Rectangle>> pieces;  // with their turns
  for (const Rectangle& each : all) {
    const int64_t width = std::min(each.run_nbytes, piece_nbytes), height = piece_nbytes / width;
    int64_t turn = 0;
    for (int64_t run = 0; run < each.outer; run += height)
      for (int64_t begin = 0; begin < each.run_nbytes; begin += width)
        pieces.emplace_back(
            turn++, each.cut(run, std::min(height, each.outer - run), begin, std::min(width, each.run_nbytes - begin)));
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Rectangle> result;
  for (const auto& [turn, piece] : pieces) result.push_back(piece);
  return result;
}

// Pieces that a gather has in staging memory at once: the host takes one while the devices copy the others.
constexpr size_t kMostStaged = 4;

}  // namespace

// A piece of a gather on its way: until `copied` its rank writes it.
struct Transfer::Staged {
  Staged(DeviceOps& ops, const Rectangle& piece, Stream to)
      : piece(piece),
        staging(ops, true, {piece.rank, to}),
        memory(staging.allocate(piece.nbytes(), DType::u8).pointer) {
    ops.copy({plain_copy(memory, piece.part, piece.nbytes())}, piece.rank);
    copied = ops.record(piece.rank);
  }
  Rectangle piece;
  StagedCopies staging;
  void* memory;
  Event copied;
};

void Transfer::take(Staged& staged, Stream to) {
  ops_.wait(to, staged.copied);  // the host itself waits, and reads it now
  ops_of(to).copy({staged.piece.from_dense(staged.memory)}, to);
}

bool Transfer::in_reach(Stream one, Stream other) const {
  return one.same_device(other) || (one.backend == other.backend && reach_(one.device, other.device));
}

void Transfer::scatter(const Layout& whole, Stream from, const std::vector<Part>& parts, const Streams& on) {
  PerStream<CopyBlock> direct;
  std::vector<Rectangle> out_of_reach;
  for (const Rectangle& each : rectangles(whole, parts, on)) {
    if (in_reach(from, each.rank))
      direct.add(each.rank, each.into_dense(each.part));
    else
      out_of_reach.push_back(each);
  }
  for (const auto& [rank, blocks] : direct.all()) {
    order(ops_, from, rank);
    ops_.copy(blocks, rank);
  }
  for (const Rectangle& piece : pieces_of(out_of_reach, piece_nbytes_)) {
    StagedCopies staging(ops_, true, {from, piece.rank});
    const Buffer staged = staging.allocate(piece.nbytes(), DType::u8);
    ops_of(from).copy({piece.into_dense(staged.pointer)}, from);
    if (!from.on_host()) order(ops_, from, piece.rank);
    ops_.copy({plain_copy(piece.part, staged.pointer, piece.nbytes())}, piece.rank);
  }
  // Only now, so that no copy of one rank waits for another's.  A host tensor was read when it was staged.
  for (const Stream& rank : distinct(on))
    if (!from.on_host()) order(ops_, rank, from);
}

void Transfer::gather(const std::vector<Part>& parts, const Streams& on, const Layout& whole, Stream to) {
  PerStream<Rectangle> direct;
  std::vector<Rectangle> out_of_reach;
  for (const Rectangle& each : rectangles(whole, parts, on)) {
    if (in_reach(each.rank, to))
      direct.add(each.rank, each);
    else
      out_of_reach.push_back(each);
  }
  std::vector<CopyBlock> blocks;
  for (const auto& [rank, all] : direct.all()) {
    order(ops_, rank, to);
    for (const Rectangle& each : all) blocks.push_back(each.from_dense(each.part));
  }
  if (!blocks.empty()) ops_of(to).copy(blocks, to);
  std::deque<std::unique_ptr<Staged>> staged;
  for (const Rectangle& piece : pieces_of(out_of_reach, piece_nbytes_)) {
    if (staged.size() == kMostStaged) {
      take(*staged.front(), to);
      staged.pop_front();
    }
    staged.push_back(std::make_unique<Staged>(ops_, piece, to));
  }
  for (const auto& each : staged) take(*each, to);
  for (const Stream& rank : distinct(on)) order(ops_, to, rank);
}

}  // namespace mgpu
