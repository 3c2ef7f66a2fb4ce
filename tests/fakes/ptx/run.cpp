// Launches: the blocks one after another; the warps of a block in turns, from barrier to barrier; the lanes of a warp
// together as long as they stand at the same instruction.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "fakes/ptx/run.h"

namespace ptx {
namespace {

// Adds a group to those that wait; lanes that wait at the same instruction become one group.
Group& join(std::vector<Group>& groups, Group&& group) {
  for (Group& each : groups)
    if (each.at == group.at && each.returns == group.returns) {
      each.lanes |= group.lanes;
      return each;
    }
  groups.push_back(std::move(group));
  return groups.back();
}

void copy_rows(Warp& warp, const std::vector<std::pair<int, int>>& rows, uint32_t lanes) {
  for (const auto& [to, from] : rows) {
    for_lanes(lanes, [&, to = to, from = from](int lane) { warp.to(to)[lane] = warp.from(from)[lane]; });
    warp.written[to] |= lanes;
  }
}

// The lane that a shuffle reads from, and whether it lies within the segment; see shfl.sync in the PTX ISA.
std::pair<int, bool> shuffle_source(int64_t mode, int lane, int by, int c) {
  const int clamp = c & 31, segment = c >> 8 & 31, most = (lane & segment) | (clamp & ~segment);
  int source = (lane & segment) | (by & ~segment);
  if (mode == kUp) source = lane - by;
  if (mode == kDown) source = lane + by;
  if (mode == kButterfly) source = lane ^ by;
  const bool inside = mode == kUp ? source >= most : source <= most;
  return {inside ? source : lane, inside};
}

}  // namespace

// All lanes that the mask names must arrive; returns whether they have, and the group goes on.
bool Run::shuffle(Warp& warp, Group& group, const Instruction& instruction) {
  const auto named = static_cast<uint32_t>(warp.from(instruction.from[3])[__builtin_ctz(group.lanes)]);
  for_lanes(group.lanes, [&](int lane) {
    if (static_cast<uint32_t>(warp.from(instruction.from[3])[lane]) != named || !(named >> lane & 1))
      fault("shuffle whose lanes do not name each other", instruction, &warp, lane);
  });
  if (named & ~warp.alive)
    fault("shuffle with a lane that has ended", instruction, &warp, __builtin_ctz(named & ~warp.alive));
  Group& here = join(warp.at_shuffle, Group(group));
  if (here.lanes != named) return false;
  group = std::move(here);
  warp.at_shuffle.erase(warp.at_shuffle.begin() + (&here - warp.at_shuffle.data()));
  uint64_t values[kLanes], inside[kLanes];
  const uint64_t *a = warp.from(instruction.from[0]), *b = warp.from(instruction.from[1]),
                 *c = warp.from(instruction.from[2]);
  for_lanes(group.lanes, [&](int lane) {
    const auto [source, within] = shuffle_source(instruction.offset, lane, b[lane] & 31, static_cast<int>(c[lane]));
    if (!(group.lanes >> source & 1)) fault("shuffle from a lane that takes no part", instruction, &warp, lane);
    values[lane] = a[source];
    inside[lane] = within;
  });
  for_lanes(group.lanes, [&](int lane) {
    warp.to(instruction.to[0])[lane] = values[lane];
    if (instruction.targets > 1) warp.to(instruction.to[1])[lane] = inside[lane];
  });
  for (int i = 0; i < instruction.targets; ++i) warp.written[instruction.to[i]] |= group.lanes;
  ++group.at;
  return true;
}

// Returns whether the group goes on.  Lanes whose guard is false go on by themselves.
bool Run::call_or_return(Warp& warp, Group& group, const Instruction& instruction, uint32_t lanes) {
  if (lanes != group.lanes) {
    join(warp.ready, {group.at + 1, group.lanes & ~lanes, group.returns});
    group.lanes = lanes;
    if (!lanes) return false;
  }
  if (instruction.kind == Kind::call) {
    copy_rows(warp, instruction.arguments, lanes);
    group.returns.push_back(group.at);
    group.at = static_cast<uint32_t>(instruction.offset);
    return true;
  }
  const bool exits = instruction.offset == 1;
  if (group.returns.empty() || exits) {
    warp.alive &= ~lanes;
    return false;
  }
  copy_rows(warp, module.code[group.returns.back()].results, lanes);
  group.at = group.returns.back() + 1;
  group.returns.pop_back();
  return true;
}

// Runs the group's next instruction; returns whether the group goes on.
bool Run::step(Warp& warp, Group& group) {
  const Instruction& instruction = module.code[group.at];
  uint32_t lanes = group.lanes;
  if (instruction.guarded) {
    if (lanes & ~warp.written[instruction.guard])
      fault("guard register read before it is written", instruction, &warp, __builtin_ctz(lanes), false);
    const uint64_t* guard = warp.from(instruction.guard);
    lanes = 0;
    for_lanes(group.lanes, [&](int lane) {
      lanes |= static_cast<uint32_t>((guard[lane] != 0) != instruction.guard_is_negated) << lane;
    });
  }
  machine.statistics.lane_instructions += static_cast<unsigned>(__builtin_popcount(lanes));
  instruction.count += lanes != 0;
  uint32_t known = lanes;  // whose sources were written
  for (int i = 0; i < instruction.sources; ++i)
    if (instruction.from[i] >= 0) known &= warp.written[instruction.from[i]];
  if (known != lanes && !instruction.copies)
    fault("register read before it is written", instruction, &warp, __builtin_ctz(lanes & ~known), false);

  switch (instruction.kind) {
    case Kind::plain:
      for (int i = 0; i < instruction.targets; ++i) {
        uint32_t& written = warp.written[instruction.to[i]];
        written = instruction.copies ? (written & ~lanes) | known : written | lanes;
      }
      if (lanes) instruction.run(warp, instruction, lanes);
      ++group.at;
      return true;
    case Kind::branch:
      if (lanes == group.lanes) {
        group.at = static_cast<uint32_t>(instruction.offset);
        return true;
      }
      if (lanes) join(warp.ready, {static_cast<uint32_t>(instruction.offset), lanes, group.returns});
      group.lanes &= ~lanes;
      ++group.at;
      return true;
    case Kind::barrier:
      if (lanes != group.lanes) fault("barrier that not all lanes of a group take", instruction, &warp, -1);
      join(warp.at_barrier, std::move(group));
      return false;
    case Kind::shuffle:
      return shuffle(warp, group, instruction);
    case Kind::sleep:
      if (lanes != group.lanes) join(warp.ready, {group.at + 1, group.lanes & ~lanes, group.returns});
      if (lanes) join(warp.asleep, {group.at + 1, lanes, group.returns});
      return false;
    default:
      return call_or_return(warp, group, instruction, lanes);
  }
}

// Runs a warp until all of its lanes have ended or wait.  In order, the group that is furthest behind goes first, so
// that lanes meet again; with a seed, a random group runs for a random while.
void Run::run_warp(Warp& warp) {
  const bool in_order = launch.seed == 0;
  while (!warp.ready.empty()) {
    const bool choose = !in_order && warp.ready.size() > 1;
    auto chosen = std::min_element(warp.ready.begin(), warp.ready.end(),
                                   [](const Group& one, const Group& other) { return one.at < other.at; });
    if (choose) chosen = warp.ready.begin() + static_cast<std::ptrdiff_t>(random() % warp.ready.size());
    Group group = std::move(*chosen);
    warp.ready.erase(chosen);
    for (uint64_t left = choose ? 1 + random() % 50 : ~uint64_t{0};; --left) {
      const bool yields = std::any_of(warp.ready.begin(), warp.ready.end(), [&](const Group& each) {
        return (each.at == group.at && each.returns == group.returns) || (in_order && each.at < group.at);
      });
      if (yields || (left == 0 && !warp.ready.empty())) {
        join(warp.ready, std::move(group));
        break;
      }
      if (!step(warp, group)) break;
    }
  }
}

void Run::start_warp(Warp& warp, int index) {
  warp.run = this;
  warp.first_thread = index * kLanes;
  const uint32_t threads = std::min<uint32_t>(kLanes, launch.threads - static_cast<uint32_t>(warp.first_thread));
  warp.alive = threads == kLanes ? ~uint32_t{0} : (uint32_t{1} << threads) - 1;
  warp.rows.resize(static_cast<size_t>(kernel.rows) * kLanes);
  warp.written.assign(static_cast<size_t>(kernel.rows), 0);
  warp.ready = {{static_cast<uint32_t>(kernel.first), warp.alive, {}}};
  warp.at_barrier.clear();
  warp.at_shuffle.clear();
  warp.asleep.clear();
  std::fill(std::begin(warp.fenced), std::end(warp.fenced), 0);
  for (const auto& [name, row] : module.specials) {
    const uint64_t first = name == "%tid.x" ? static_cast<uint64_t>(warp.first_thread) : 0;
    const bool counts = name == "%tid.x" || name == "%laneid";
    const uint64_t value = name == "%ntid.x"        ? launch.threads
                           : name == "%ctaid.x"     ? block_number
                           : name == "%nctaid.x"    ? launch.blocks
                           : name == "%globaltimer" ? machine.clock_ns
                           : name[1] == 'n'         ? 1  // the other dimensions
                                                    : 0;
    for (uint64_t lane = 0; lane < kLanes; ++lane) warp.to(row)[lane] = counts ? first + lane : value;
    warp.written[row] = ~uint32_t{0};
  }
}

// Every thread waits now.  They must all have ended, or all stand at the same barrier, which they pass.
void Run::step_across_barrier() {
  uint32_t at = ~uint32_t{0};
  for (Warp& warp : warps) {
    if (!warp.at_shuffle.empty())
      fault("shuffle that some of its lanes never reach", module.code[warp.at_shuffle[0].at], &warp,
            __builtin_ctz(warp.at_shuffle[0].lanes));
    uint32_t here = 0;
    for (const Group& group : warp.at_barrier) {
      if (at != ~uint32_t{0} && at != group.at)
        fault("barrier that threads reach at different instructions, line " + std::to_string(module.code[at].line),
              module.code[group.at], &warp, __builtin_ctz(group.lanes));
      at = group.at;
      here |= group.lanes;
    }
    if (warp.alive != here) fault("barrier that some threads never reach", module.code[at], &warp, -1);
  }
  if (at == ~uint32_t{0}) return;
  for (Warp& warp : warps) {
    const int threads = std::min<int>(kLanes, static_cast<int>(launch.threads) - warp.first_thread);
    if (__builtin_popcount(warp.alive) != threads)
      fault("barrier after threads of the block have ended", module.code[at], &warp, -1);
    for (Group& group : warp.at_barrier) {
      ++group.at;
      warp.ready.push_back(std::move(group));
    }
    warp.at_barrier.clear();
  }
  ++epoch;
}

bool Run::all_ended() const {
  return std::all_of(warps.begin(), warps.end(), [](const Warp& warp) { return warp.alive == 0; });
}

// Those that sleep go on; meanwhile the time has passed.
void Run::wake() {
  last_region_ = nullptr;  // others may have freed it
  for (Warp& warp : warps) {
    for (Group& group : warp.asleep) warp.ready.push_back(std::move(group));
    warp.asleep.clear();
    if (const auto clock = module.specials.find("%globaltimer"); clock != module.specials.end())
      std::fill_n(warp.to(clock->second), kLanes, machine.clock_ns);
  }
}

void Run::start_block(uint32_t number) {
  block_number = number;
  ++epoch;
  acquired_.clear();
  shared.assign(module.shared_nbytes, static_cast<char>(0xdb));
  shared_initialized.assign(module.shared_nbytes, 0);
  shared_accesses.assign(module.shared_nbytes, LastAccess());
  warps.resize((launch.threads + kLanes - 1) / kLanes);
  for (size_t i = 0; i < warps.size(); ++i) start_warp(warps[i], static_cast<int>(i));
}

// Goes on with the block that was started; returns whether it has ended.
bool Run::run_block() {
  std::vector<size_t> order(warps.size());
  std::iota(order.begin(), order.end(), size_t{0});
  wake();
  while (!all_ended()) {
    if (launch.seed) std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) run_warp(warps[i]);
    if (std::any_of(warps.begin(), warps.end(), [](const Warp& warp) { return !warp.asleep.empty(); })) {
      machine.clock_ns += 1'000'000;
      return false;
    }
    step_across_barrier();
  }
  return true;
}

void Run::copy_arguments() {
  const auto refuse = [&](const std::string& why) { throw std::runtime_error(kernel.name + ": " + why); };
  parameters.assign(kernel.parameters_nbytes, 0);
  if (launch.arguments.size() != kernel.parameters.size())
    refuse(std::to_string(kernel.parameters.size()) + " parameters, but " + std::to_string(launch.arguments.size()) +
           " arguments");
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const auto& [pointer, nbytes] = launch.arguments[i];
    if (nbytes != kernel.parameters[i].nbytes)
      refuse("parameter " + std::to_string(i) + " has " + std::to_string(kernel.parameters[i].nbytes) +
             " bytes, its argument " + std::to_string(nbytes));
    std::memcpy(parameters.data() + kernel.parameters[i].offset, pointer, nbytes);
  }
  if (launch.blocks == 0 || launch.blocks > 2147483647 || launch.threads == 0 || launch.threads > 1024)
    refuse("an invalid grid of " + std::to_string(launch.blocks) + " x " + std::to_string(launch.threads));
  if (kernel.max_threads && launch.threads > kernel.max_threads)
    refuse("blocks of " + std::to_string(launch.threads) + " threads, more than its launch bounds");
}

void Run::begin() {
  copy_arguments();
  ++machine.statistics.launches;
  order_ = launch.only_blocks;
  order_.erase(std::remove_if(order_.begin(), order_.end(), [&](uint32_t number) { return number >= launch.blocks; }),
               order_.end());
  if (order_.empty() && launch.only_blocks.empty() && launch.seed) {
    order_.resize(launch.blocks);
    std::iota(order_.begin(), order_.end(), 0);
  }
  // Blocks that sleep may wait for the same block of another launch, and one runs at a time.
  const bool sleeps = std::any_of(module.code.begin() + kernel.first, module.code.begin() + kernel.last,
                                  [](const Instruction& each) { return each.kind == Kind::sleep; });
  if (launch.seed && !sleeps) std::shuffle(order_.begin(), order_.end(), random);
  end_ = launch.only_blocks.empty() ? launch.blocks : order_.size();
}

bool Run::go_on() {
  if (!std::exchange(is_begun_, true)) begin();
  for (; next_ < end_; ++next_) {
    if (all_ended()) start_block(order_.empty() ? static_cast<uint32_t>(next_) : order_[next_]);
    if (!run_block()) return false;
  }
  return true;
}

}  // namespace ptx
