// Runs CUDA kernels from their PTX on the host, one instruction of 32 lanes at a time, and reports what a GPU would
// trap on or leave undefined: accesses out of bounds or misaligned, bytes and registers read before they are written,
// data races within a block and between blocks, barriers and shuffles that not all threads reach, division by zero.
//
// Device addresses are host addresses.  It reads the PTX that nvcc makes of this project's kernels; any other opcode is
// an error at load time, with its line.  Of atomics there is the addition; a block that counts itself by one, after a
// fence, hands what it wrote over to the blocks that count after it and then fence.  A thread that sleeps lets other
// launches run, for whose flags (st.release, ld.acquire) it may wait.  Not modelled: timing, streams, SASS, plain
// accesses to what others change by atomics, races between launches, local memory, 2-D grids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ptx {

struct Module;  // the kernels of one PTX text (module.h)

// Memory that kernels may access.  `initialized` has one byte per byte of memory, 0 where nothing was written yet;
// empty means that all of it is initialized.
struct Region {
  uint64_t begin;
  uint64_t nbytes;
  std::string name;
  std::vector<uint8_t> initialized;
  int device = -1;               // -1: every device may access it
  bool mapped_for_peers = true;  // otherwise its own device alone
};

struct Launch {
  std::string kernel;
  uint32_t blocks = 1;
  uint32_t threads = 1;
  std::vector<std::pair<const void*, size_t>> arguments;  // address and size of each
  std::vector<uint32_t> only_blocks;                      // empty: all of them
  uint64_t seed = 0;  // 0: blocks and warps run in order; otherwise blocks, warps and diverged lanes in a random order
  int device = 0;
};

struct Statistics {
  uint64_t launches = 0;
  uint64_t lane_instructions = 0;
  // Accesses to global memory, summed over lanes: [0] loads, [1] stores; then by log2 of the bytes of an access.
  uint64_t accesses[2][5] = {};
};

// How many of a kernel's instructions ran at least once, and those that did not.
struct Coverage {
  struct Line {
    int line;                 // of the PTX
    std::string source;       // "move.cuh:42", from -lineinfo; empty where the text has none
    std::string instruction;  // the PTX
  };
  size_t executed = 0, total = 0;
  std::vector<Line> never;
};

class Machine {
 public:
  Machine();
  ~Machine();

  // Adds the kernels of a PTX text.  Throws std::runtime_error with the line of what it cannot read.
  void load(const std::string& text);
  std::vector<std::string> kernels() const;
  // The bytes of each parameter of a kernel; throws std::runtime_error if there is no such kernel.
  std::vector<size_t> parameters(const std::string& kernel) const;

  void add(Region region);
  void remove(uint64_t begin);
  // Bytes that were written by something other than a kernel.
  void mark_written(uint64_t begin, size_t nbytes);
  // Whether memory outside of all regions may be accessed: for processes whose memory others allocate.
  bool allow_unknown_memory = false;
  // Whether a device may access another's memory; null: it may.
  std::function<bool(int device, int owner)> reaches;
  // What %globaltimer reads: it moves while somebody sleeps.
  uint64_t clock_ns = 1;
  // Races are found by bookkeeping for each byte, which is most of the time of a launch.
  bool find_races = true;

  // Runs a kernel to its end, or to the first fault that a GPU would trap on; returns whether it came to its end.
  // All that was found is appended to `faults`: one that does not trap, such as a race, is told only there.
  bool launch(const Launch& launch);
  // The same in parts: the returned function returns whether the launch has ended.  If not, some of its threads sleep,
  // so that other launches may run.
  std::function<bool()> start(Launch launch);
  std::vector<std::string> faults;
  Statistics statistics;
  Coverage coverage(const std::string& kernel) const;

 private:
  friend struct Run;
  std::pair<const Module*, const struct Kernel*> find(const std::string& kernel) const;

  std::map<uint64_t, Region> regions_;
  std::vector<std::shared_ptr<Module>> modules_;
};

}  // namespace ptx
