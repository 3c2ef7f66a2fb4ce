// Every collective and transfer on the deferred device, with 40 seeds: ranks on devices of their own, sharing devices,
// and on devices that do not reach each other.
#include <stdexcept>

#include "conformance.h"

static void on(const std::vector<int>& devices, bool peers_reach, uint64_t seed) {
  const auto make = [&] { return std::make_unique<DeferredWorld>(seed, devices, peers_reach); };
  conformance::collectives(make, {0, 1, 7, 40});
  conformance::transfers(make);
}

// Wrong answers must be possible: work that nobody waits for has not run, and runs late.
static void the_device_is_late() {
  DeferredWorld world(0, {0, 1}, true);
  int value = 0;
  world.then(world.streams()[0], [&] { value = 1; });
  const mgpu::Event event = world.ops().record(world.streams()[0]);
  world.ops().synchronize(world.streams()[1]);
  CHECK(value == 0 && !world.ops().reached(event) && !world.device().idle());
  world.ops().wait(world.streams()[1], event);
  world.ops().synchronize(world.streams()[1]);
  CHECK(value == 1 && world.ops().reached(event) && world.device().idle());
}

static void staging_is_poisoned_when_it_is_let_go() {
  DeferredWorld world(0, {0}, true);
  auto memory = world.ops().staging(4, world.streams());
  auto* bytes = static_cast<unsigned char*>(memory.get());
  bytes[0] = 1;
  world.ops().keep(world.streams()[0], std::move(memory));
  CHECK(bytes[0] == 1 && !world.device().idle());
  world.ops().synchronize(world.streams()[0]);
  CHECK(bytes[0] == mgpu::fakes::kPoison && world.device().idle());
}

static void memory_out_of_reach_is_an_error() {
  DeferredWorld world(0, {0, 1}, false);
  void *here = world.allocate(0, 4), *there = world.allocate(1, 4);
  CHECK_THROWS(std::logic_error, "touches memory of device 1",
               (world.ops().copy({{here, there, 1, 4, 0, 0}}, world.streams()[0]), 0));
}

int main() {
  the_device_is_late();
  staging_is_poisoned_when_it_is_let_go();
  memory_out_of_reach_is_an_error();
  for (uint64_t seed = 0; seed < 40; ++seed) {
    for (const auto& devices : std::vector<std::vector<int>>{{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4, 5, 6, 7}})
      on(devices, true, seed);
    on({0, 0, 0}, true, seed);
    on({0, 1, 1, 0, 2}, true, seed);
    on({0, 1, 2}, false, seed);
    on({0, 1, 1}, false, seed);
  }
  return passed();
}
