#include "core/counters.h"

#include <mutex>

namespace mgpu {
namespace {

// Never destroyed: worker threads may still count while the interpreter goes down.
std::mutex& mutex() {
  static auto* it = new std::mutex;
  return *it;
}
Counts& counts() {
  static auto* it = new Counts;
  return *it;
}

}  // namespace

void count(const std::string& operation, const std::string& algorithm, int rank, int64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex());
  Count& entry = counts()[{operation, algorithm, rank}];
  ++entry.calls;
  entry.nbytes += nbytes;
}

Counts counters() {
  const std::lock_guard<std::mutex> lock(mutex());
  return counts();
}

void reset_counters() {
  const std::lock_guard<std::mutex> lock(mutex());
  counts().clear();
}

}  // namespace mgpu
