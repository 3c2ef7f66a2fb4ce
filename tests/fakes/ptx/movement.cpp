// ld and st, mov and its forms that pack and unpack registers, cvta, selp.
#include "fakes/ptx/operations.h"

namespace ptx {
namespace {

void load(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* address = warp.from(instruction.from[0]);
  const int nbytes = size_of(instruction.type);
  for_lanes(lanes, [&](int lane) {
    // A target may be the register of the address, so this is read first.
    const uint64_t at = address[lane] + static_cast<uint64_t>(instruction.offset);
    const char* from = warp.run->access(warp, instruction, lane, at, nbytes * instruction.targets, false);
    for (int k = 0; k < instruction.targets; ++k) {
      uint64_t bits = 0;
      std::memcpy(&bits, from + k * nbytes, static_cast<size_t>(nbytes));
      if (is_signed(instruction.type))
        bits = truncated(static_cast<int64_t>(bits), instruction.type, instruction.width[k]);
      warp.to(instruction.to[k])[lane] = bits;
    }
  });
}

void store(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* address = warp.from(instruction.from[0]);
  const int nbytes = size_of(instruction.type), count = instruction.sources - 1;
  for_lanes(lanes, [&](int lane) {
    const uint64_t at = address[lane] + static_cast<uint64_t>(instruction.offset);
    char* to = warp.run->access(warp, instruction, lane, at, nbytes * count, true);
    for (int k = 0; k < count; ++k)
      std::memcpy(to + k * nbytes, warp.from(instruction.from[1 + k]) + lane, static_cast<size_t>(nbytes));
  });
}

void add_atomically(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t *address = warp.from(instruction.from[0]), *added = warp.from(instruction.from[1]);
  for_lanes(lanes, [&](int lane) {
    const uint64_t at = address[lane] + static_cast<uint64_t>(instruction.offset);
    char* to = warp.run->access_atomically(warp, instruction, lane, at, sizeof(uint32_t));
    uint32_t before;
    std::memcpy(&before, to, sizeof before);
    const uint32_t after = before + static_cast<uint32_t>(added[lane]);
    std::memcpy(to, &after, sizeof after);
    if (instruction.targets) warp.to(instruction.to[0])[lane] = before;
  });
}

// A flag, of one launch for another, or among the blocks of one: no race.
void load_flag(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* address = warp.from(instruction.from[0]);
  for_lanes(lanes, [&](int lane) {
    const uint64_t at = address[lane] + static_cast<uint64_t>(instruction.offset);
    std::memcpy(warp.to(instruction.to[0]) + lane, warp.run->access_atomically(warp, instruction, lane, at, 8), 8);
  });
}

void store_flag(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* address = warp.from(instruction.from[0]);
  for_lanes(lanes, [&](int lane) {
    const uint64_t at = address[lane] + static_cast<uint64_t>(instruction.offset);
    std::memcpy(warp.run->access_atomically(warp, instruction, lane, at, 8), warp.from(instruction.from[1]) + lane, 8);
  });
}

uint64_t low_bits(int bits) { return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

void unpack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* from = warp.from(instruction.from[0]);
  const int bits = 8 * size_of(instruction.type) / instruction.targets;
  for (int part = 0; part < instruction.targets; ++part) {
    uint64_t* to = warp.to(instruction.to[part]);
    for_lanes(lanes, [&](int lane) { to[lane] = from[lane] >> bits * part & low_bits(bits); });
  }
}

void pack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int bits = 8 * static_cast<int>(instruction.offset);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes, [&](int lane) {
    uint64_t whole = 0;
    for (int part = 0; part < instruction.sources; ++part)
      whole |= (warp.from(instruction.from[part])[lane] & low_bits(bits)) << bits * part;
    to[lane] = whole;
  });
}

void select(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t *a = warp.from(instruction.from[0]), *b = warp.from(instruction.from[1]),
                 *which = warp.from(instruction.from[2]);
  uint64_t* to = warp.to(instruction.to[0]);
  for_lanes(lanes, [&](int lane) { to[lane] = which[lane] ? a[lane] : b[lane]; });
}

}  // namespace

void add_data_movement(Operations& all) {
  all["ld"] = load;
  all["st"] = store;
  all["ld.flag"] = load_flag;
  all["st.flag"] = store_flag;
  all["atom.global.add.u32"] = add_atomically;
  all["membar.gl"] = [](Warp& warp, const Instruction&, uint32_t lanes) { warp.run->fence(warp, lanes); };
  all["pack"] = pack;
  all["unpack"] = unpack;
  UNARY("mov", uint64_t, a);
  all["cvta"] = [](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    unary<uint64_t>(warp, instruction, lanes,
                    [&](uint64_t a) { return a + static_cast<uint64_t>(instruction.offset); });
  };
  for (const char* type : {"u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64"})
    all[std::string("selp.") + type] = select;
}

Operation find_operation(const std::string& name) {
  static const Operations all = [] {
    Operations made;
    add_arithmetic(made);
    add_conversions(made);
    add_data_movement(made);
    return made;
  }();
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace ptx
