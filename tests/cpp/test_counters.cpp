#include <thread>
#include <vector>

#include "check.h"
#include "core/counters.h"

int main() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([] {
      for (int k = 0; k < 1000; ++k) mgpu::count("copy", "direct", k % 2, 3);
    });
  for (auto& thread : threads) thread.join();
  const auto counts = mgpu::counters();
  CHECK(counts.size() == 2);
  CHECK(counts.at({"copy", "direct", 0}).calls == 2000 && counts.at({"copy", "direct", 1}).nbytes == 6000);
  mgpu::reset_counters();
  CHECK(mgpu::counters().empty());
  return passed();
}
