// What the tests of failures share: a small all-reduce with a known result, and the error that a call must raise.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "fakes/nccl/nccl_world.h"

namespace mgpu::fakes {

constexpr auto kEnough = std::chrono::seconds(10);  // a test that waits as long hangs

inline nccl::Limits limits(int init, int collective, int close) {
  return {std::chrono::milliseconds(init), std::chrono::milliseconds(collective), std::chrono::milliseconds(close)};
}

// The call raises NcclError with the code, in time, and with all the words.
template <class Call>
void raises(int code, const std::vector<std::string>& words, const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  std::string message = "(nothing was thrown)";
  int got = -1;
  try {
    call();
  } catch (const NcclError& error) {
    message = error.what();
    got = error.code;
  }
  CHECK(std::chrono::steady_clock::now() - start < kEnough);
  for (const std::string& word : words)
    if (message.find(word) == std::string::npos)
      std::fprintf(stderr, "'%s' is not in: %s\n", word.c_str(), message.c_str());
  for (const std::string& word : words) CHECK(message.find(word) != std::string::npos);
  if (got != code) std::fprintf(stderr, "code %d: %s\n", got, message.c_str());
  CHECK(got == code);
  CHECK(fakeNcclDepth() == 0);
}

inline void all_reduce(NcclWorld& world, Memories& all) {
  world.collectives->all_reduce(all.buffers(), all.buffers(), ReduceOp::sum, Algorithm::nccl, world.ranks());
}
inline Memories seven(const NcclWorld& world) {
  return Memories(world.size(), DType::i32, 7, [](size_t rank, int64_t i) { return static_cast<double>(rank) + i; });
}
inline void works(NcclWorld& world) {
  Memories all = seven(world);
  all_reduce(world, all);
  world.finish();
  const double ranks = static_cast<double>(world.size());
  for (const Numbers& each : all.all) CHECK(each.get(6) == ranks * (ranks - 1) / 2 + 6 * ranks);
}

}  // namespace mgpu::fakes
