#include "core/transcript.h"

#include "bindings/bindings.h"

namespace mgpu::bindings {
namespace {

using DeedTuple = std::tuple<bool, Pointers, Pointers, int64_t, int, StreamTuple, int64_t, int64_t>;

Pointers numbers_of(const std::vector<const void*>& pointers) {
  Pointers numbers;
  for (const void* pointer : pointers) numbers.push_back(reinterpret_cast<Pointer>(pointer));
  return numbers;
}

std::vector<DeedTuple> close() {
  std::vector<DeedTuple> result;
  for (const Deed& deed : close_transcript())
    result.emplace_back(deed.sums, numbers_of(deed.sources), numbers_of(deed.targets), deed.nbytes, deed.call,
                        StreamTuple{deed.on.device, reinterpret_cast<Pointer>(deed.on.handle)}, deed.begin_ns,
                        deed.end_ns);
  return result;
}

}  // namespace

void bind_transcript(py::module_& m) {
  m.def("open_transcript", &open_transcript, "From now on this thread's copies and sums are written down.");
  m.def("close_transcript", &close, "What was written down since, in order; nothing is written any more.");
}

}  // namespace mgpu::bindings
