#include "core/host_staging.h"

#include <exception>

#include "core/buffers.h"

namespace mgpu {
namespace {

constexpr int64_t kAlignment = 256;  // bytes: copies in one piece of memory begin on multiples of it

bool is_there(const Buffer& buffer) { return buffer.pointer != nullptr && buffer.count > 0; }

int64_t rounded(int64_t nbytes) { return (nbytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

StagedCopies::~StagedCopies() {
  if (memory_.empty()) return;
  try {
    const auto all = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(memory_));
    for (const Stream& user : distinct(users_)) ops_.keep(user, all);
  } catch (const std::exception&) {  // the device has failed, and the first error is on its way to the caller
  }
}

Buffer StagedCopies::allocate(int64_t count, DType dtype) {
  memory_.push_back(ops_.staging(count * static_cast<int64_t>(itemsize(dtype)), users_));
  return {memory_.back().get(), count, dtype};
}

Buffer StagedCopies::of(const Buffer& buffer, Stream on) {
  if (!wanted_ || !is_there(buffer)) return buffer;
  const Buffer copy = allocate(buffer.count, buffer.dtype);
  ops_.copy({plain_copy(copy.pointer, buffer.pointer, nbytes_of(buffer))}, on);
  return copy;
}

Buffers StagedCopies::of(const Buffers& buffers, const Streams& on) {
  Buffers result;
  for (size_t rank = 0; rank < buffers.size(); ++rank) result.push_back(of(buffers[rank], on[rank]));
  return result;
}

Buffers StagedCopies::of_all(const Buffers& buffers, Stream on) {
  int64_t nbytes = 0;
  for (const Buffer& buffer : buffers) nbytes += is_there(buffer) ? rounded(nbytes_of(buffer)) : 0;
  if (!wanted_ || nbytes == 0) return buffers;
  const Buffer whole = allocate(nbytes, DType::u8);
  Buffers result = buffers;
  std::vector<CopyBlock> blocks;
  int64_t offset = 0;
  for (Buffer& buffer : result) {
    if (!is_there(buffer)) continue;
    blocks.push_back(plain_copy(at(whole, offset), buffer.pointer, nbytes_of(buffer)));
    buffer.pointer = at(whole, offset);
    offset += rounded(nbytes_of(buffer));
  }
  ops_.copy(blocks, on);
  return result;
}

}  // namespace mgpu
