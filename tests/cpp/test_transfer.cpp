#include <cstring>
#include <numeric>

#include "check.h"
#include "core/error.h"
#include "core/transfer.h"
#include "rooms.h"

using namespace mgpu;

// Cuts [outer][rows][inner] bytes into parts and joins them again; every byte is checked, and those beyond the ends.
static void there_and_back(int64_t outer, const std::vector<int64_t>& rows, int64_t inner) {
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  std::vector<unsigned char> whole(outer * all * inner + 8, 0xEE), back = whole;
  for (size_t i = 0; i < whole.size() - 8; ++i) whole[i] = static_cast<unsigned char>(i * 31 + 7);
  std::vector<std::vector<unsigned char>> memory;
  for (int64_t count : rows) memory.emplace_back(outer * count * inner + 8, 0xEE);
  std::vector<Part> parts;
  for (size_t i = 0; i < rows.size(); ++i) parts.push_back({memory[i].data(), rows[i]});
  scatter(host_device_ops(), {whole.data(), outer, all, inner}, parts);
  int64_t start = 0;
  for (size_t part = 0; part < rows.size(); ++part) {
    for (int64_t o = 0; o < outer; ++o)
      CHECK(std::memcmp(memory[part].data() + o * rows[part] * inner, whole.data() + (o * all + start) * inner,
                        rows[part] * inner) == 0);
    CHECK(memory[part].back() == 0xEE && memory[part][outer * rows[part] * inner] == 0xEE);
    start += rows[part];
  }
  gather(host_device_ops(), parts, {back.data(), outer, all, inner});
  for (size_t i = 0; i < whole.size() - 8; ++i) CHECK(back[i] == whole[i]);
  CHECK(back[whole.size() - 8] == 0xEE);
}

int main() {
  for (int64_t outer : {int64_t{0}, int64_t{1}, int64_t{3}})
    for (int64_t inner : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{4096}})
      for (const auto& rows : std::vector<std::vector<int64_t>>{{7}, {3, 2}, {1, 0, 4}, {2, 2, 2, 2, 1, 1, 1, 1}})
        there_and_back(outer, rows, inner);
  there_and_back(2, {1000, 1001, 999}, 512);  // large enough to be shared by threads
  unsigned char byte = 0;
  CHECK_THROWS(InvalidArgument, "3 rows together", (scatter(host_device_ops(), {&byte, 1, 2, 1}, {{&byte, 3}}), 0));
  return passed();
}
