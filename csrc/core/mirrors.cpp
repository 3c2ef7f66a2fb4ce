#include "core/mirrors.h"

#include "core/buffers.h"

namespace mgpu {

Buffer Mirrors::room(const Buffer& like) {
  memory_.push_back(ops_.staging(nbytes_of(like)));
  return {memory_.back().get(), like.count, like.dtype};
}

Buffer Mirrors::of(const Buffer& buffer, Stream on) {
  if (!wanted_ || buffer.pointer == nullptr || buffer.count == 0) return buffer;
  const Buffer copy = room(buffer);
  ops_.copy({plain_copy(copy.pointer, buffer.pointer, nbytes_of(buffer))}, on);
  return copy;
}

Buffers Mirrors::of(const Buffers& buffers, const Streams& on) {
  Buffers result;
  for (size_t rank = 0; rank < buffers.size(); ++rank) result.push_back(of(buffers[rank], on[rank]));
  return result;
}

void Mirrors::keep(const Streams& readers) {
  for (const Stream& reader : readers)
    for (const auto& memory : memory_) ops_.keep(reader, memory);
}

}  // namespace mgpu
