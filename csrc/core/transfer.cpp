#include "core/transfer.h"

#include <numeric>
#include <string>

#include "core/error.h"

namespace mgpu {
namespace {

void require_rows(const Layout& whole, const std::vector<Part>& parts) {
  const int64_t rows = std::accumulate(parts.begin(), parts.end(), int64_t{0},
                                       [](int64_t sum, const Part& part) { return sum + part.rows; });
  require(rows == whole.rows, "the parts have " + std::to_string(rows) + " rows together, the whole tensor has " +
                                  std::to_string(whole.rows));
}

// Calls block(part, place of its first run in the whole) for every part that has bytes.
template <class MakeBlock>
std::vector<CopyBlock> blocks_of(const Layout& whole, const std::vector<Part>& parts, MakeBlock make_block) {
  require_rows(whole, parts);
  std::vector<CopyBlock> blocks;
  char* place = static_cast<char*>(whole.pointer);
  for (const Part& part : parts) {
    const int64_t run_nbytes = part.rows * whole.inner_nbytes;
    if (run_nbytes * whole.outer > 0) blocks.push_back(make_block(part, place, run_nbytes));
    place += run_nbytes;
  }
  return blocks;
}

}  // namespace

void scatter(DeviceOps& ops, const Layout& whole, const std::vector<Part>& parts) {
  const int64_t pitch = whole.rows * whole.inner_nbytes;
  ops.copy(blocks_of(whole, parts, [&](const Part& part, char* place, int64_t run_nbytes) {
    return CopyBlock{part.pointer, place, whole.outer, run_nbytes, run_nbytes, pitch};
  }));
}

void gather(DeviceOps& ops, const std::vector<Part>& parts, const Layout& whole) {
  const int64_t pitch = whole.rows * whole.inner_nbytes;
  ops.copy(blocks_of(whole, parts, [&](const Part& part, char* place, int64_t run_nbytes) {
    return CopyBlock{place, part.pointer, whole.outer, run_nbytes, pitch, run_nbytes};
  }));
}

}  // namespace mgpu
