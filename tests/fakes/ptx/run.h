// The state of one launch.
#pragma once

#include <random>
#include <set>
#include <unordered_map>

#include "fakes/ptx/module.h"

namespace ptx {

struct Trap {};  // thrown by a fault that ends the launch

// Lanes of a warp that stand at the same instruction, with the same return addresses.
struct Group {
  uint32_t at;
  uint32_t lanes;
  std::vector<uint32_t> returns;
};

struct Run;
struct Warp {
  Run* run;
  int first_thread;
  uint32_t alive;                 // lanes that have not ended
  std::vector<uint64_t> rows;     // registers, kLanes values each
  std::vector<uint32_t> written;  // of each row, the lanes that were written
  std::vector<Group> ready, at_barrier, at_shuffle, asleep;
  uint64_t fenced[kLanes];  // when each lane fenced last, by the run's clock; 0: never

  uint64_t* to(int row) { return rows.data() + row * kLanes; }
  const uint64_t* from(int row) const;
};

// The last accesses to a byte.  Threads are numbered block * 1024 + thread + 1; 0 means none.
struct LastAccess {
  uint64_t writer = 0, reader = 0, other_reader = 0;
  uint32_t writer_epoch = 0, reader_epoch = 0;
  uint32_t writer_instruction = 0, reader_instruction = 0, other_instruction = 0;
};
// What a block hands over by an atomic: all that this thread wrote, and the others of its block before this epoch.
struct Release {
  uint64_t thread;
  uint32_t epoch;
};
using Releases = std::unordered_map<uint64_t, Release>;  // by block
// A thread's atomic, by which it learns what others have handed over.
struct Acquire {
  uint64_t thread, time;
  uint32_t epoch;
  Releases released;
};
constexpr uint64_t kPageNbytes = 4096;
struct AccessPage {
  LastAccess bytes[kPageNbytes];
};

struct Run {
  Run(Machine& machine, const Module& module, const Kernel& kernel, Launch given)
      : machine(machine), module(module), kernel(kernel), launch(std::move(given)), random(launch.seed) {}

  // run.cpp
  bool go_on();  // whether it has ended; otherwise some threads sleep
  bool run_block();
  void run_warp(Warp& warp);

  // memory.cpp: the host address of `nbytes` at an address, after every check.
  char* access(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes, bool write);
  char* access_atomically(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes);
  void fence(Warp& warp, uint32_t lanes);
  void fault(const std::string& what, const Instruction& instruction, const Warp* warp, int lane, bool traps = true);

  Machine& machine;
  const Module& module;
  const Kernel& kernel;
  const Launch launch;
  std::mt19937_64 random;
  uint32_t block_number = 0;
  uint32_t epoch = 1;  // barriers passed, over all blocks
  std::vector<Warp> warps;
  std::vector<char> parameters, shared;
  std::vector<uint8_t> shared_initialized;
  std::vector<LastAccess> shared_accesses;

 private:
  void copy_arguments();
  void begin();
  void start_block(uint32_t number);
  bool all_ended() const;
  void wake();
  void start_warp(Warp& warp, int index);
  void step_across_barrier();
  bool step(Warp& warp, Group& group);  // false: the group went elsewhere
  bool shuffle(Warp& warp, Group& group, const Instruction& instruction);
  bool call_or_return(Warp& warp, Group& group, const Instruction& instruction, uint32_t lanes);

  char* access_parameters(Warp&, const Instruction&, int lane, uint64_t address, int nbytes, bool write);
  char* access_shared(Warp&, const Instruction&, int lane, uint64_t address, int nbytes, bool write);
  char* access_global(Warp&, const Instruction&, int lane, uint64_t address, int nbytes, bool write);
  Region* region_of(Warp&, const Instruction&, int lane, uint64_t address, int nbytes, bool write);
  void find_race(LastAccess& last, Warp&, const Instruction&, int lane, bool write, uint64_t address, bool is_shared);
  LastAccess& last_access(uint64_t address);
  bool was_handed_over(uint64_t writer, uint32_t epoch_then, const Warp& warp, int lane) const;

  std::vector<uint32_t> order_;  // of the blocks; none: all, in order
  size_t next_ = 0, end_ = 0;    // block of the order that runs or is next, and the end
  bool is_begun_ = false;
  std::unordered_map<uint64_t, std::unique_ptr<AccessPage>> pages_;
  AccessPage* last_page_ = nullptr;
  uint64_t last_page_number_ = ~uint64_t{0};
  Region* last_region_ = nullptr;
  uint64_t clock_ = 0;                               // of fences and atomics
  std::unordered_map<uint64_t, Releases> released_;  // by the address of the atomic
  std::vector<Acquire> acquired_;                    // by the block that runs
  std::set<std::string> reported_;
};

inline const uint64_t* Warp::from(int row) const {
  return row >= 0 ? rows.data() + row * kLanes : run->module.constant_rows.data() + ~row * kLanes;
}

template <class Each>
inline void for_lanes(uint32_t lanes, Each&& each) {
  if (lanes == ~uint32_t{0})
    for (int lane = 0; lane < kLanes; ++lane) each(lane);
  else
    for (; lanes; lanes &= lanes - 1) each(__builtin_ctz(lanes));
}

}  // namespace ptx
