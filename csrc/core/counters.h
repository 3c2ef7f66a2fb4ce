// What really ran: calls and bytes per operation, algorithm and rank.  Tests assert these, so that a silent fall-back
// to the plain module cannot pass for a team at work.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

namespace mgpu {

struct Count {
  int64_t calls = 0;
  int64_t nbytes = 0;
};
using CountKey = std::tuple<std::string, std::string, int>;  // operation, algorithm, rank
using Counts = std::map<CountKey, Count>;

void count(const std::string& operation, const std::string& algorithm, int rank, int64_t nbytes);
Counts counters();
void reset_counters();

}  // namespace mgpu
