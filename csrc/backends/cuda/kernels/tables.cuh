// Fills the tables that travel in a launch's arguments: 4 KiB of them with every driver, 32 KiB from CUDA 12.1 on.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/move.cuh"
#include "backends/cuda/kernels/start.cuh"
#include "backends/cuda/launch.h"

namespace mgpu::cuda {

// How many a launch can take: more than 4 KiB of arguments need a driver of CUDA 12.1.
inline int most_moves() {
  static const int most = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010 ? kManyMoves : kFewMoves;
  }();
  return most;
}

template <int kMoves>
MoveTable<kMoves> table_of(const std::vector<Transferred>& all, const std::vector<int64_t>& tiles, const Batch& batch) {
  MoveTable<kMoves> table;
  table.count = static_cast<int>(batch.count);
  table.shift = 0;
  while ((batch.tiles >> table.shift) + 2 > MoveTable<kMoves>::kOwners) ++table.shift;
  uint32_t first = 0, named = 0;
  for (int i = 0; i < table.count; ++i) {
    const Transferred& each = all[batch.begin + i];
    table.moves[i] = {each.to, each.from, each.count};
    table.first_tile[i] = first;
    first += static_cast<uint32_t>(tiles[batch.begin + i]);
    for (; int64_t{named} << table.shift < first; ++named) table.owner[named] = static_cast<uint16_t>(i);
  }
  table.owner[named] = static_cast<uint16_t>(table.count - 1);
  return table;
}

// Calls few(table, batch) or many(table, batch) for every launch that is needed: a large table costs time to hand over.
template <class Few, class Many>
void for_tables(const std::vector<Transferred>& all, const std::vector<int64_t>& tiles, Few&& few, Many&& many) {
  for (const Batch& batch : batches_of(tiles, most_moves(), kMostBlocks)) {
    if (batch.count <= kFewMoves)
      few(table_of<kFewMoves>(all, tiles, batch), batch);
    else
      many(table_of<kManyMoves>(all, tiles, batch), batch);
  }
}

}  // namespace mgpu::cuda
