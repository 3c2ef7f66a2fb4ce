// The launch arithmetic, tried for all small cases: every element belongs to exactly one thread of one tile, and every
// wide access stands on a multiple of its width.
#include "backends/cuda/launch_plan.h"

#include <set>

#include "check.h"

using namespace mgpu::cuda;

// How often each element of an extent is touched when all tiles are run as the kernels run them.
static std::vector<int> touched(const Extent& extent, int64_t count) {
  std::vector<int> times(count);
  for (int64_t tile = 0; tile < tiles_of(extent); ++tile) {
    for (int64_t v = tile * kTileVectors; v < (tile + 1) * kTileVectors && v < extent.vectors; ++v)
      for (int k = 0; k < extent.width; ++k) ++times[extent.head + v * extent.width + k];
    if (tile != 0) continue;
    CHECK(extent.head < kThreads && extent.tail < kThreads);  // a thread each
    for (int64_t i = 0; i < extent.head; ++i) ++times[i];
    for (int64_t i = 0; i < extent.tail; ++i) ++times[extent.head + extent.vectors * extent.width + i];
  }
  return times;
}

static void heads() {
  for (int one : {1, 2, 4, 8})
    for (int other : {1, 2, 4, 8})
      for (uint64_t a = 0; a < 32; a += one)
        for (uint64_t b = 0; b < 32; b += other) {
          const int width = vector_width(one, other), head = common_head(a, one, b, other);
          CHECK(width * std::min(one, other) == kAlignment && head < width);
          for (int before = 0; before < width; ++before) {
            const bool both = (a + before * one) % kAlignment == 0 && (b + before * other) % kAlignment == 0;
            CHECK(!both || head == before || (head >= 0 && head < before));
          }
          for (int64_t count : {0, 1, 3, 15, 16, 17, 1000, 20'000}) {
            const Extent extent = extent_of(count, head, width);
            CHECK(extent.head + extent.vectors * extent.width + extent.tail == count);
            for (int times : touched(extent, count)) CHECK(times == 1);
          }
        }
}

static void copies() {
  for (uint64_t to = 0; to < 32; ++to)
    for (uint64_t from = 0; from < 32; ++from) {
      const CopyShape shape = copy_shape(to, from);
      CHECK((to + shape.head) % shape.width == 0 && (from + shape.head) % shape.width == 0 && shape.head < shape.width);
      CHECK(shape.width == 16 || (to - from) % (2 * shape.width) != 0);  // no wider would do
      for (int64_t count : {0, 1, 7, 16, 50'000})
        for (int times : touched(extent_of(count, shape.head, shape.width), count)) CHECK(times == 1);
    }
}

static void owners() {
  for (const std::vector<int64_t>& tiles :
       std::vector<std::vector<int64_t>>{{1}, {3, 1, 2}, {1, 1, 1, 1, 1}, {5, 1, 1, 7, 2, 1}}) {
    std::vector<uint32_t> first, owner;
    for (size_t index = 0; index < tiles.size(); ++index) {
      first.push_back(static_cast<uint32_t>(owner.size()));
      for (int64_t tile = 0; tile < tiles[index]; ++tile) owner.push_back(static_cast<uint32_t>(index));
    }
    for (uint32_t tile = 0; tile < owner.size(); ++tile)
      CHECK(owner_of(first.data(), static_cast<int>(first.size()), tile) == static_cast<int>(owner[tile]));
  }
}

static void segments() {
  const std::vector<int64_t> rows{2, 3, 0, 7, 0, 0, 7, 5, 0, 20, 1, 0};  // begin, count, and a third column
  for (int64_t element = 0; element < 30; ++element) {
    int64_t wanted = 0;
    while (wanted < 4 && rows[wanted * 3] + rows[wanted * 3 + 1] <= element) ++wanted;
    CHECK(segment_at(rows.data(), 4, 3, element) == wanted);
  }
  CHECK(segment_at(nullptr, 0, 3, 5) == 0);
}

static void launches() {
  for (int64_t limit : {1, 2, 128})
    for (int64_t most : {5, 1000}) {
      const std::vector<int64_t> tiles{1, 2, 5, 1, 1, 4, 3, 1, 1, 1, 1, 2};
      int64_t next = 0;
      for (const Batch& batch : batches_of(tiles, limit, most)) {
        CHECK(batch.begin == next && batch.count >= 1 && batch.count <= limit && batch.tiles <= most);
        int64_t sum = 0;
        for (int64_t i = 0; i < batch.count; ++i) sum += tiles[batch.begin + i];
        CHECK(sum == batch.tiles);
        next += batch.count;
      }
      CHECK(next == static_cast<int64_t>(tiles.size()));
    }
  CHECK(batches_of({}, 4, 4).empty());
}

static void beyond_32_bits() {
  const int64_t count = (int64_t{1} << 33) + 5;
  const Extent extent = extent_of(count, common_head(4, 4, 4, 4), 4);
  CHECK(extent.head == 3 && extent.head + extent.vectors * 4 + extent.tail == count);
  CHECK(tiles_of(extent) == (extent.vectors + kTileVectors - 1) / kTileVectors && tiles_of(extent) < 2147483647);
}

int main() {
  heads();
  copies();
  owners();
  segments();
  launches();
  beyond_32_bits();
  return passed();
}
