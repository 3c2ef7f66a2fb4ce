// Instructions: opcode and operands to an Instruction with register rows.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>

#include "fakes/ptx/reader.h"

namespace ptx {
namespace {

bool is_number(const std::string& text) { return std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-'; }

bool has(const std::vector<std::string>& parts, const char* wanted) {
  return std::find(parts.begin(), parts.end(), wanted) != parts.end();
}

// The name under which an operation is known: without the spelling of its types (b32 is u32), and without rounding to
// nearest, which is the default.
std::string operation_name(const std::vector<std::string>& parts) {
  static const char* const names[] = {"",    "pred", "u8",  "s8",  "u16",  "s16", "u32",
                                      "s32", "u64",  "s64", "f16", "bf16", "f32", "f64"};
  std::string name = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    const Type type = type_of(parts[i]);
    if (parts[i] != "rn") name += "." + (type == Type::none ? parts[i] : names[static_cast<int>(type)]);
  }
  return name;
}

uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

int Reader::constant(uint64_t value) {
  const auto [made, is_new] = constants_.emplace(value, static_cast<int>(module_->constants.size()));
  if (is_new) module_->constants.push_back(value);
  return ~made->second;
}

uint64_t Reader::number(const std::string& text, Type type) {
  const std::string kind = text.substr(0, 2);
  if (kind == "0f" || kind == "0F") {
    const auto bits = static_cast<uint32_t>(std::stoul(text.substr(2), nullptr, 16));
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return type == Type::f64 ? bits_of(value) : bits;
  }
  if (kind == "0d" || kind == "0D") {
    if (type == Type::f32 || type == Type::u32) lexer_.fail("a double where 4 bytes are wanted: " + text);
    return std::stoull(text.substr(2), nullptr, 16);
  }
  const bool negative = text[0] == '-';
  uint64_t value = std::stoull(text.substr(negative), nullptr, 0);
  if (negative) value = -value;
  const int nbytes = size_of(type);
  return nbytes == 8 ? value : value & ((uint64_t{1} << 8 * nbytes) - 1);
}

void Reader::add_target(Instruction& instruction, const std::string& name) {
  const Register made = name == "_" ? Register{new_row(), Type::u64} : find(name);
  instruction.to[instruction.targets] = made.row;
  instruction.width[instruction.targets++] = size_of(made.type);
}

void Reader::add_source(Instruction& instruction, const std::string& operand, Type type) {
  if (operand.empty()) lexer_.fail("an operand is missing");
  int& row = instruction.from[instruction.sources++];
  if (is_number(operand))
    row = constant(number(operand, type));
  else if (operand[0] == '%')
    row = find(operand).row;
  else if (const uint64_t address = symbol(operand))
    row = constant(address);
  else
    lexer_.fail("unknown operand " + operand);
}

void Reader::read_instruction(std::string opcode) {
  Instruction instruction;
  instruction.line = lexer_.line();
  instruction.source_line = source_line_;
  instruction.source_file = file_;
  if (opcode.empty() && lexer_.take('@')) {
    instruction.guarded = true;
    instruction.guard_is_negated = lexer_.take('!');
    instruction.guard = find(lexer_.word()).row;
    opcode = lexer_.word();
  }
  const std::string rest = trimmed(lexer_.until(';'));
  instruction.text = opcode + " " + rest;
  decode(instruction, opcode, split(rest, ','));
  module_->code.push_back(std::move(instruction));
}

void Reader::decode(Instruction& instruction, const std::string& opcode, const std::vector<std::string>& operands) {
  std::vector<std::string> parts;
  std::stringstream dots(opcode);
  for (std::string part; std::getline(dots, part, '.');) parts.push_back(part);
  for (size_t i = 1; i < parts.size(); ++i)
    if (type_of(parts[i]) != Type::none) instruction.type = type_of(parts[i]);
  const std::string& base = parts[0];
  if (base == "bra") {
    instruction.kind = Kind::branch;
    jumps_.emplace_back(module_->code.size(), operands.at(0));
  } else if (base == "ret" || base == "exit") {
    instruction.kind = Kind::ret;
    instruction.offset = base == "exit";
  } else if (base == "bar" || base == "barrier") {
    if (!has(parts, "sync") || operands.at(0) != "0" || operands.size() > 1)
      lexer_.fail("unknown barrier " + instruction.text);
    instruction.kind = Kind::barrier;
  } else if (base == "nanosleep") {
    instruction.kind = Kind::sleep;
  } else if (base == "shfl") {
    decode_shuffle(instruction, parts, operands);
  } else if (base == "call") {
    decode_call(instruction, operands);
  } else if (base == "ld" || base == "st") {
    decode_memory(instruction, parts, operands);
  } else if (base == "atom") {
    decode_atomic(instruction, parts, operands);
  } else if (base == "membar") {
    instruction.run = find_operation(operation_name(parts));
    if (!instruction.run) lexer_.fail("unknown fence " + instruction.text);
  } else if (base == "mov") {
    decode_move(instruction, operands);
  } else if (base == "cvta") {
    add_target(instruction, operands.at(0));
    add_source(instruction, operands.at(1), Type::u64);
    instruction.offset = has(parts, "shared") ? kSharedWindow : has(parts, "param") ? kParamWindow : 0;
    if (has(parts, "to")) instruction.offset = -instruction.offset;
    instruction.run = find_operation("cvta");
  } else if (base == "cvt") {
    decode_convert(instruction, parts, operands);
  } else {
    decode_plain(instruction, parts, operands);
  }
}

void Reader::decode_shuffle(Instruction& instruction, const std::vector<std::string>& parts,
                            const std::vector<std::string>& operands) {
  if (!has(parts, "sync") || !has(parts, "b32") || operands.size() != 5)
    lexer_.fail("unknown shuffle " + instruction.text);
  instruction.kind = Kind::shuffle;
  instruction.offset = has(parts, "up") ? kUp : has(parts, "down") ? kDown : has(parts, "bfly") ? kButterfly : kIndexed;
  for (const std::string& each : split(operands[0], '|')) add_target(instruction, each);
  for (size_t i = 1; i < 5; ++i) add_source(instruction, operands[i], Type::u32);
}

// "(results), name, (arguments)"
void Reader::decode_call(Instruction& instruction, const std::vector<std::string>& operands) {
  instruction.kind = Kind::call;
  const bool returns = operands.at(0)[0] == '(';
  const std::string& name = operands.at(returns);
  const auto found = functions_.find(name);
  if (found == functions_.end()) lexer_.fail("unknown function " + name);
  if (returns) {
    const auto results = items_of(operands[0]);
    for (size_t i = 0; i < results.size(); ++i)
      instruction.results.emplace_back(slot(results[i]), found->second.results.at(i));
  }
  if (operands.size() > size_t{1} + returns) {
    const auto arguments = items_of(operands[1 + returns]);
    for (size_t i = 0; i < arguments.size(); ++i)
      instruction.arguments.emplace_back(found->second.arguments.at(i), slot(arguments[i]));
  }
  calls_.emplace_back(module_->code.size(), name);
}

// "mov" also takes a register apart into several, or puts several together.
void Reader::decode_move(Instruction& instruction, const std::vector<std::string>& operands) {
  const std::string &to = operands.at(0), &from = operands.at(1);
  instruction.copies = true;
  if (to[0] == '{') {
    for (const std::string& each : items_of(to)) add_target(instruction, each);
    add_source(instruction, from, instruction.type);
    instruction.run = find_operation("unpack");
  } else if (from[0] == '{') {
    add_target(instruction, to);
    const auto all = items_of(from);
    instruction.offset = size_of(instruction.type) / static_cast<int>(all.size());  // bytes of each
    const Type type = instruction.offset == 4 ? Type::u32 : instruction.offset == 2 ? Type::u16 : Type::u8;
    for (const std::string& each : all) add_source(instruction, each, type);
    instruction.run = find_operation("pack");
  } else {
    add_target(instruction, to);
    add_source(instruction, from, instruction.type);
    instruction.run = find_operation("mov");
  }
}

void Reader::decode_convert(Instruction& instruction, const std::vector<std::string>& parts,
                            const std::vector<std::string>& operands) {
  std::vector<Type> types;
  for (size_t i = 1; i < parts.size(); ++i)
    if (type_of(parts[i]) != Type::none) types.push_back(type_of(parts[i]));
  if (types.size() != 2 || has(parts, "sat") || has(parts, "ftz"))
    lexer_.fail("unknown conversion " + instruction.text);
  const auto [to, from] = std::pair{types[0], types[1]};
  const bool exact = is_float(to) == is_float(from) && (!is_float(to) || size_of(to) > size_of(from));
  if (!has(parts, "rzi") && !has(parts, "rn") && !exact) lexer_.fail("unknown conversion " + instruction.text);
  add_target(instruction, operands.at(0));
  add_source(instruction, operands.at(1), from);
  instruction.type = to;
  instruction.source_type = from;
  instruction.offset = has(parts, "rzi");
  instruction.run = find_operation("cvt");
}

void Reader::decode_plain(Instruction& instruction, const std::vector<std::string>& parts,
                          const std::vector<std::string>& operands) {
  add_target(instruction, operands.at(0));
  for (size_t i = 1; i < operands.size(); ++i) {
    const bool is_shift_count = (parts[0] == "shl" || parts[0] == "shr") && i == 2;
    const bool is_predicate = parts[0] == "selp" && i == 3;
    add_source(instruction, operands[i], is_shift_count ? Type::u32 : is_predicate ? Type::pred : instruction.type);
  }
  instruction.run = find_operation(operation_name(parts));
  if (!instruction.run) lexer_.fail("unknown instruction " + instruction.text);
}

// An argument or a result of a call is a register row, not memory.
bool Reader::decode_slot(Instruction& instruction, const std::string& base, const std::string& value, bool load) {
  const int row = slot(base);
  if (row < 0) return false;
  if (load) {
    instruction.from[instruction.sources++] = row;
    add_target(instruction, value);
  } else {
    add_source(instruction, value, instruction.type);
    instruction.to[instruction.targets] = row;
    instruction.width[instruction.targets++] = 8;
  }
  instruction.run = find_operation("mov");
  return true;
}

// "[base+offset]": returns the base.
std::string Reader::decode_address(Instruction& instruction, const std::string& bracket) {
  if (bracket.size() < 3 || bracket[0] != '[') lexer_.fail("no address in " + instruction.text);
  const auto address = split(bracket.substr(1, bracket.size() - 2), '+');
  if (address.size() > 1) instruction.offset = static_cast<int64_t>(number(address[1], Type::s64));
  return address[0];
}

// "target, [address], value"
void Reader::decode_atomic(Instruction& instruction, const std::vector<std::string>& parts,
                           const std::vector<std::string>& operands) {
  instruction.space = Space::global;
  instruction.run = find_operation(operation_name(parts));
  if (!instruction.run || operands.size() != 3) lexer_.fail("unknown atomic " + instruction.text);
  add_target(instruction, operands[0]);
  add_source(instruction, decode_address(instruction, operands[1]), Type::u64);
  add_source(instruction, operands[2], instruction.type);
}

void Reader::decode_memory(Instruction& instruction, const std::vector<std::string>& parts,
                           const std::vector<std::string>& operands) {
  const bool load = parts[0] == "ld";
  bool is_flag = false;
  size_t vector = 1;
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    if (part == "global")
      instruction.space = Space::global;
    else if (part == "shared")
      instruction.space = Space::shared;
    else if (part == "param")
      instruction.space = Space::param;
    else if (part == "v2" || part == "v4")
      vector = static_cast<size_t>(part[1] - '0');
    else if (part == "acquire" || part == "release")
      is_flag = true;
    else if (part != "sys" && part != "nc" && part != "wb" && part != "cs" && part != "volatile" &&
             type_of(part) == Type::none)
      lexer_.fail("unknown access " + instruction.text);
  }
  const std::string& value = operands.at(!load);
  const std::string base = decode_address(instruction, operands.at(load));
  const auto values = value[0] == '{' ? items_of(value) : std::vector<std::string>{value};
  if (values.size() != vector) lexer_.fail("a vector of another width in " + instruction.text);

  if (instruction.space == Space::param && decode_slot(instruction, base, values[0], load)) {
    if (instruction.offset != 0 || vector != 1) lexer_.fail("an argument in parts: " + instruction.text);
    return;
  }
  if (instruction.space == Space::param && !load) lexer_.fail("a store to a parameter");
  add_source(instruction, base, Type::u64);
  for (const std::string& each : values) {
    if (load)
      add_target(instruction, each);
    else
      add_source(instruction, each, instruction.type);
  }
  instruction.run = find_operation(std::string(load ? "ld" : "st") + (is_flag ? ".flag" : ""));
}

}  // namespace ptx
