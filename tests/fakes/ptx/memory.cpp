// Every access of a kernel: alignment, bounds, whether the bytes were written, and races between threads.
#include <cstdio>
#include <stdexcept>

#include "fakes/ptx/run.h"

namespace ptx {
namespace {

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

// Turns a generic address into one of its space.
Space space_of(Space space, uint64_t& address) {
  if (space != Space::generic) return space;
  for (const auto& [window, windowed] : {std::pair{kSharedWindow, Space::shared}, {kParamWindow, Space::param}})
    if (address - window < uint64_t{1} << 32) {
      address -= window;
      return windowed;
    }
  return Space::global;
}

}  // namespace

// Tells each kind of fault once per instruction; the first one has the addresses.
void Run::fault(const std::string& what, const Instruction& instruction, const Warp* warp, int lane, bool traps) {
  if (reported_.insert(std::to_string(instruction.line) + what.substr(0, 12)).second) {
    std::string text =
        what + ": " + launch.kernel + " line " + std::to_string(instruction.line) + ": " + instruction.text;
    const auto file = module.files.find(instruction.source_file);
    if (file != module.files.end()) text += " (" + file->second + ":" + std::to_string(instruction.source_line) + ")";
    text += ", block " + std::to_string(block_number);
    if (warp && lane >= 0) text += " thread " + std::to_string(warp->first_thread + lane);
    machine.faults.push_back(text);
  }
  if (traps) throw Trap();
}

char* Run::access(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes, bool write) {
  const Space space = space_of(instruction.space, address);
  if (address % static_cast<unsigned>(nbytes) != 0)
    fault("misaligned address " + hex(address) + " of " + std::to_string(nbytes) + " bytes", instruction, &warp, lane);
  if (space == Space::param) return access_parameters(warp, instruction, lane, address, nbytes, write);
  if (space == Space::shared) return access_shared(warp, instruction, lane, address, nbytes, write);
  return access_global(warp, instruction, lane, address, nbytes, write);
}

char* Run::access_parameters(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes,
                             bool write) {
  const uint64_t end = address + static_cast<uint64_t>(nbytes);
  if (write || address < kParamBegin || end > kParamBegin + parameters.size())
    fault("access outside of the parameters, byte " + std::to_string(static_cast<int64_t>(address - kParamBegin)),
          instruction, &warp, lane);
  return parameters.data() + (address - kParamBegin);
}

char* Run::access_shared(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes,
                         bool write) {
  const uint64_t end = address + static_cast<uint64_t>(nbytes);
  bool inside = false;
  for (const auto& [name, variable] : module.shared)
    inside |= address >= variable.first && end <= variable.first + variable.second;
  const uint64_t first = address - kSharedBegin;
  if (!inside)
    fault("access outside of shared memory, byte " + std::to_string(static_cast<int64_t>(first)), instruction, &warp,
          lane);
  for (uint64_t k = first; k < first + static_cast<uint64_t>(nbytes); ++k) {
    if (write)
      shared_initialized[k] = 1;
    else if (!shared_initialized[k])
      fault("shared memory read before it is written", instruction, &warp, lane, false);
    if (machine.find_races) find_race(shared_accesses[k], warp, instruction, lane, write, k, true);
  }
  return shared.data() + first;
}

// The region of an access; null where memory may be somebody else's.
Region* Run::region_of(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes, bool write) {
  const uint64_t end = address + static_cast<uint64_t>(nbytes);
  const auto holds = [&](const Region& region) {
    return address >= region.begin && end <= region.begin + region.nbytes;
  };
  if (last_region_ && holds(*last_region_)) return last_region_;
  auto next = machine.regions_.upper_bound(address);
  Region* before = next == machine.regions_.begin() ? nullptr : &std::prev(next)->second;
  if (before && holds(*before)) {
    last_region_ = before;
    const bool is_foreign = before->device >= 0 && before->device != launch.device;
    if (is_foreign &&
        (!before->mapped_for_peers || (machine.reaches && !machine.reaches(launch.device, before->device))))
      fault("access of device " + std::to_string(launch.device) + " to memory of device " +
                std::to_string(before->device) + ", which it does not reach",
            instruction, &warp, lane);
    return before;
  }
  if (machine.allow_unknown_memory) return nullptr;
  std::string text = (write ? "store outside of memory, " : "load outside of memory, ") + std::to_string(nbytes) +
                     " bytes at " + hex(address);
  if (before)
    text += ", " + std::to_string(address - before->begin) + " bytes after the start of " + before->name + " of " +
            std::to_string(before->nbytes) + " bytes";
  if (next != machine.regions_.end())
    text += ", " + std::to_string(next->first - address) + " bytes before " + next->second.name;
  fault(text, instruction, &warp, lane);
  return nullptr;
}

char* Run::access_global(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes,
                         bool write) {
  ++machine.statistics.accesses[write][__builtin_ctz(static_cast<unsigned>(nbytes))];
  Region* region = region_of(warp, instruction, lane, address, nbytes, write);
  if (region && !region->initialized.empty()) {
    const uint64_t first = address - region->begin;
    for (uint64_t k = first; k < first + static_cast<uint64_t>(nbytes); ++k) {
      if (write)
        region->initialized[k] = 1;
      else if (!region->initialized[k])
        fault("load of memory that was never written, byte " + std::to_string(k) + " of " + region->name, instruction,
              &warp, lane, false);
    }
  }
  if (machine.find_races)
    for (uint64_t byte = address; byte < address + static_cast<uint64_t>(nbytes); ++byte)
      find_race(last_access(byte), warp, instruction, lane, write, byte, false);
  return reinterpret_cast<char*>(address);
}

LastAccess& Run::last_access(uint64_t address) {
  if (address / kPageNbytes != last_page_number_) {
    last_page_number_ = address / kPageNbytes;
    auto& page = pages_[last_page_number_];
    if (!page) page = std::make_unique<AccessPage>();
    last_page_ = page.get();
  }
  return last_page_->bytes[address % kPageNbytes];
}

void Run::fence(Warp& warp, uint32_t lanes) {
  ++clock_;
  for_lanes(lanes, [&](int lane) { warp.fenced[lane] = clock_; });
}

// The host address of what an atomic changes.  Atomics do not race with each other.
char* Run::access_atomically(Warp& warp, const Instruction& instruction, int lane, uint64_t address, int nbytes) {
  if (space_of(instruction.space, address) != Space::global)
    fault("atomic outside of global memory", instruction, &warp, lane);
  const bool find_races = machine.find_races;
  machine.find_races = false;
  char* at = access(warp, instruction, lane, address, nbytes, false);
  machine.find_races = find_races;
  const uint64_t me = uint64_t{block_number} * 1024 + static_cast<uint64_t>(warp.first_thread + lane) + 1;
  Releases& released = released_[address];
  acquired_.push_back({me, ++clock_, epoch, released});
  if (warp.fenced[lane] != 0) released[block_number] = {me, epoch};
  return at;
}

// Whether a lane may count on another block's write: a fence and an atomic of that block, then an atomic of the lane's
// block, which the lane knows of, and a fence of the lane.
bool Run::was_handed_over(uint64_t writer, uint32_t epoch_then, const Warp& warp, int lane) const {
  const uint64_t me = uint64_t{block_number} * 1024 + static_cast<uint64_t>(warp.first_thread + lane) + 1;
  for (const Acquire& each : acquired_) {
    if (warp.fenced[lane] < each.time || (each.thread != me && each.epoch == epoch)) continue;
    const auto found = each.released.find((writer - 1) / 1024);
    if (found == each.released.end()) continue;
    if (found->second.thread == writer || epoch_then < found->second.epoch) return true;
  }
  return false;
}

// A race: two threads, at least one of them writing, in different blocks or with no barrier of their block in between.
// Two readers are remembered, so that one of them is not the thread that writes next.
void Run::find_race(LastAccess& last, Warp& warp, const Instruction& instruction, int lane, bool write,
                    uint64_t address, bool is_shared) {
  const uint64_t me = uint64_t{block_number} * 1024 + static_cast<uint64_t>(warp.first_thread + lane) + 1;
  const auto at = static_cast<uint32_t>(&instruction - module.code.data());
  const auto unordered = [&](uint64_t other, uint32_t then) {
    if (other == 0 || other == me) return false;
    if ((other - 1) / 1024 == block_number) return then == epoch;
    return !was_handed_over(other, then, warp, lane);
  };
  const auto report = [&](const char* kind, uint64_t other, uint32_t theirs) {
    const std::string where =
        is_shared ? " in shared memory at byte " + std::to_string(address) : " at " + hex(address);
    fault(kind + where + " with block " + std::to_string((other - 1) / 1024) + " thread " +
              std::to_string((other - 1) % 1024) + ", line " + std::to_string(module.code[theirs].line) + ": " +
              module.code[theirs].text,
          instruction, &warp, lane, false);
  };
  if (unordered(last.writer, last.writer_epoch))
    report(write ? "race of two writes" : "race of a read with a write", last.writer, last.writer_instruction);
  if (write) {
    if (unordered(last.reader, last.reader_epoch))
      report("race of a write with a read", last.reader, last.reader_instruction);
    if (unordered(last.other_reader, last.reader_epoch))
      report("race of a write with a read", last.other_reader, last.other_instruction);
    last.writer = me;
    last.writer_epoch = epoch;
    last.writer_instruction = at;
    return;
  }
  if (last.reader == me && last.reader_epoch == epoch) return;
  const bool of_another_block = (last.reader - 1) / 1024 != block_number;
  if (last.reader != 0 && last.reader != me &&
      (of_another_block || last.reader_epoch == epoch || last.other_reader == 0)) {
    last.other_reader = last.reader;
    last.other_instruction = last.reader_instruction;
  }
  last.reader = me;
  last.reader_epoch = epoch;
  last.reader_instruction = at;
}

}  // namespace ptx
