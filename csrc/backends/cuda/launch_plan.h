// Launch arithmetic: where the aligned part of an array begins, how work is cut into tiles, which tile belongs to whom.
// Integers in, integers out, and no CUDA: the host plans with these functions, the kernels repeat them, and tests on a
// machine without a GPU try them all.
#pragma once

#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#define MGPU_HOST_DEVICE __host__ __device__
#else
#define MGPU_HOST_DEVICE
#endif

namespace mgpu::cuda {

constexpr int kThreads = 256;         // of a block
constexpr int kVectorsPerThread = 4;  // of a whole tile
constexpr int kLoadsInFlight = 4;     // of 16 bytes each, which a thread begins before it waits for the first
constexpr int kTileVectors = kThreads * kVectorsPerThread;
constexpr int kAlignment = 16;               // bytes of the widest access
constexpr int64_t kMostBlocks = 2147483647;  // of a grid

// Elements that one access of 16 bytes moves of the narrower of two dtypes; of the wider one it takes several.
MGPU_HOST_DEVICE constexpr int vector_width(int one_size, int other_size) {
  return kAlignment / (one_size < other_size ? one_size : other_size);
}

// Widths are powers of two, and a device is slow at dividing by what it learns at run time.
MGPU_HOST_DEVICE constexpr int log2_of(int width) {
  int power = 0;
  while ((1 << power) < width) ++power;
  return power;
}

// Returns how many vectors of `vector_nbytes` a thread loads before it uses the first.
MGPU_HOST_DEVICE constexpr int together(int vector_nbytes) {
  const int vectors = kLoadsInFlight * kAlignment / vector_nbytes;
  return vectors < 1 ? 1 : vectors < kVectorsPerThread ? vectors : kVectorsPerThread;
}

// Elements of a row of gather_rows that one block does, `width` in an access.
MGPU_HOST_DEVICE constexpr int row_tile(int width) { return kThreads * kLoadsInFlight * width; }
// Returns how many rows one block of gather_rows does: 4, 2 or 1, so that each thread has loads in flight of all.
constexpr int rows_of_block(int64_t row_count, int width) {
  return 4 * row_count <= row_tile(width) ? 4 : 2 * row_count <= row_tile(width) ? 2 : 1;
}

// Returns how many elements come before the first index at which both arrays are on a multiple of 16 bytes; -1 if there
// is no such index, and then elements are moved one by one.
MGPU_HOST_DEVICE constexpr int common_head(uint64_t one, int one_size, uint64_t other, int other_size) {
  const int width = vector_width(one_size, other_size);
  for (int head = 0; head < width; ++head)
    if (((one + head * one_size) & (kAlignment - 1)) == 0 && ((other + head * other_size) & (kAlignment - 1)) == 0)
      return head;
  return -1;
}

// `count` elements as a head, whole vectors of `width`, and a tail.  Without alignment the width is 1.
struct Extent {
  int width;
  int64_t head;
  int64_t vectors;
  int64_t tail;
};
MGPU_HOST_DEVICE constexpr Extent extent_of(int64_t count, int head, int width) {
  if (head < 0) return {1, 0, count, 0};
  const int64_t before = head < count ? head : count;
  const int64_t vectors = (count - before) >> log2_of(width);
  return {width, before, vectors, count - before - vectors * width};
}

// How bytes are copied between two addresses: in accesses as wide as the distance of the addresses allows, after a head
// of bytes up to the first address that is aligned to this width.
struct CopyShape {
  int width;  // 16, 8, 4, 2 or 1 bytes
  int head;
};
MGPU_HOST_DEVICE constexpr CopyShape copy_shape(uint64_t to, uint64_t from) {
  int width = kAlignment;
  while (((to - from) & (width - 1)) != 0) width >>= 1;
  return {width, static_cast<int>((width - (to & (width - 1))) & (width - 1))};
}

// Blocks for one extent: at least one, which also does the head and the tail.
MGPU_HOST_DEVICE constexpr int64_t tiles_of(const Extent& extent) {
  const int64_t tiles = (extent.vectors + kTileVectors - 1) / kTileVectors;
  return tiles > 1 ? tiles : 1;
}

// Returns the index of the array that a tile belongs to: the last one with first[index] <= tile.  `first` rises, and
// first[0] is 0.
template <class Index>
MGPU_HOST_DEVICE constexpr int owner_of(const Index* first, int count, Index tile) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first[middle] <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Returns the index of the segment in which `element` lies, otherwise of the next one; `rows` where there is none.
// `segments`: rows of `columns` numbers, of which the first two are begin and count.
MGPU_HOST_DEVICE constexpr int64_t segment_at(const int64_t* segments, int64_t rows, int columns, int64_t element) {
  int64_t low = 0, high = rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle * columns] + segments[middle * columns + 1] <= element)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Elements of flat buffers that one block of an optimizer updates.  Long tiles, because each begins with a search; but
// short enough that the last blocks of a launch, which leave multiprocessors idle, are a small part of it.  On an H100
// twice and four times as many were slower.
constexpr int64_t kFlatTile = 4096;

// A launch has room for so many entries of a table in its arguments (4 KiB; 32 KiB from CUDA 12.1 on).
struct Batch {
  int64_t begin;
  int64_t count;
  int64_t tiles;
};
// Cuts a table into launches: up to `limit` entries each, and no more than `most_tiles` blocks.
inline std::vector<Batch> batches_of(const std::vector<int64_t>& tiles, int64_t limit, int64_t most_tiles) {
  std::vector<Batch> batches;
  for (int64_t i = 0; i < static_cast<int64_t>(tiles.size()); ++i) {
    if (batches.empty() || batches.back().count == limit || batches.back().tiles + tiles[i] > most_tiles)
      batches.push_back({i, 0, 0});
    ++batches.back().count;
    batches.back().tiles += tiles[i];
  }
  return batches;
}

}  // namespace mgpu::cuda
