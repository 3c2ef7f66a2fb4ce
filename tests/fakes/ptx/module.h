// A PTX text as instructions: made by the reader (reader.cpp, decode.cpp), run by the machine (run.cpp).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fakes/ptx/machine.h"

namespace ptx {

constexpr int kLanes = 32;
// Where shared memory and parameters begin in their own address spaces.  `cvta` adds the window of the space, which
// turns such an address into a generic one.
constexpr uint64_t kSharedBegin = 0x400, kParamBegin = 0x1000;
constexpr uint64_t kSharedWindow = 0x7f01000000000000, kParamWindow = 0x7f02000000000000;

enum class Type : uint8_t { none, pred, u8, s8, u16, s16, u32, s32, u64, s64, f16, bf16, f32, f64 };
int size_of(Type type);
Type type_of(const std::string& name);  // "f32", "b64", ...; none if it is no type
inline bool is_signed(Type t) { return t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64; }
inline bool is_float(Type t) { return t >= Type::f16; }
enum class Space : uint8_t { generic, global, shared, param };
enum class Kind : uint8_t { plain, branch, barrier, shuffle, sleep, call, ret };
enum Shuffle { kUp, kDown, kButterfly, kIndexed };

struct Warp;
struct Instruction;
using Operation = void (*)(Warp& warp, const Instruction& instruction, uint32_t lanes);

// Registers are rows of 32 lanes, named by their index; negative ones are constants.
struct Instruction {
  Operation run = nullptr;  // of a plain instruction
  Kind kind = Kind::plain;
  Type type = Type::none, source_type = Type::none;
  Space space = Space::generic;
  uint8_t sources = 0, targets = 0;
  bool guarded = false, guard_is_negated = false;
  bool copies = false;  // registers alone: a copy of one that was never written is another such, and no fault
  int guard = 0;
  int to[4] = {}, from[5] = {};
  int width[4] = {};   // bytes of the target registers
  int64_t offset = 0;  // of an address; of a branch or call, the instruction it goes to
  int line = 0;        // of the PTX
  int source_line = 0, source_file = 0;
  std::string text;
  std::vector<std::pair<int, int>> arguments, results;  // of a call: rows copied to and from the function's
  mutable uint64_t count = 0;                           // how often it ran
};

struct Parameter {
  std::string name;
  size_t nbytes, offset;
};
struct Kernel {
  std::string name;
  int first = 0, last = 0;  // instructions
  std::vector<Parameter> parameters;
  size_t parameters_nbytes = 0;
  uint32_t max_threads = 0;
  int rows = 0;
};
struct Module {
  std::vector<Instruction> code;
  std::map<std::string, Kernel> kernels;
  std::map<std::string, std::pair<uint64_t, uint64_t>> shared;  // address and size of each variable
  uint64_t shared_nbytes = 0;
  std::vector<uint64_t> constants;
  std::vector<uint64_t> constant_rows;  // each constant in 32 lanes
  std::map<std::string, int> specials;  // rows of %tid.x and its like
  std::map<int, std::string> files;
  int function_rows = 0;  // rows of functions and specials, before those of a kernel
};

std::shared_ptr<Module> read_module(const std::string& text);
// The operation of a plain instruction by its full name ("add.f32"); null if it is unknown.
Operation find_operation(const std::string& name);

}  // namespace ptx
