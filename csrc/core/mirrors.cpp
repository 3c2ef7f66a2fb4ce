#include "core/mirrors.h"

#include <exception>

#include "core/buffers.h"

namespace mgpu {
namespace {

constexpr int64_t kApart = 256;  // bytes: mirrors in one piece of memory begin on multiples of it

bool is_there(const Buffer& buffer) { return buffer.pointer != nullptr && buffer.count > 0; }

int64_t rounded(int64_t nbytes) { return (nbytes + kApart - 1) / kApart * kApart; }

}  // namespace

Mirrors::~Mirrors() {
  if (memory_.empty()) return;
  try {
    const auto all = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(memory_));
    for (const Stream& user : distinct(users_)) ops_.keep(user, all);
  } catch (const std::exception&) {  // the device has failed, and what failed first is being told already
  }
}

Buffer Mirrors::room(int64_t count, DType dtype) {
  memory_.push_back(ops_.staging(count * static_cast<int64_t>(itemsize(dtype)), users_));
  return {memory_.back().get(), count, dtype};
}

Buffer Mirrors::of(const Buffer& buffer, Stream on) {
  if (!wanted_ || !is_there(buffer)) return buffer;
  const Buffer copy = room(buffer.count, buffer.dtype);
  ops_.copy({plain_copy(copy.pointer, buffer.pointer, nbytes_of(buffer))}, on);
  return copy;
}

Buffers Mirrors::of(const Buffers& buffers, const Streams& on) {
  Buffers result;
  for (size_t rank = 0; rank < buffers.size(); ++rank) result.push_back(of(buffers[rank], on[rank]));
  return result;
}

Buffers Mirrors::of_all(const Buffers& buffers, Stream on) {
  int64_t nbytes = 0;
  for (const Buffer& buffer : buffers) nbytes += is_there(buffer) ? rounded(nbytes_of(buffer)) : 0;
  if (!wanted_ || nbytes == 0) return buffers;
  const Buffer whole = room(nbytes, DType::u8);
  Buffers result = buffers;
  std::vector<CopyBlock> blocks;
  int64_t place = 0;
  for (Buffer& buffer : result) {
    if (!is_there(buffer)) continue;
    blocks.push_back(plain_copy(at(whole, place), buffer.pointer, nbytes_of(buffer)));
    buffer.pointer = at(whole, place);
    place += rounded(nbytes_of(buffer));
  }
  ops_.copy(blocks, on);
  return result;
}

}  // namespace mgpu
