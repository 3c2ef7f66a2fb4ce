#include "backends.h"
#include "bindings/bindings.h"
#include "core/counters.h"
#include "core/transfer.h"

namespace mgpu::bindings {
namespace {

using LayoutTuple = std::tuple<Pointer, int64_t, int64_t, int64_t>;  // pointer, outer, rows, inner_nbytes
using PartTuples = std::vector<std::pair<Pointer, int64_t>>;         // pointer, rows

Layout layout_of(const LayoutTuple& whole) {
  const auto& [pointer, outer, rows, inner_nbytes] = whole;
  return {reinterpret_cast<void*>(pointer), outer, rows, inner_nbytes};
}

std::vector<Part> parts_of(const PartTuples& tuples) {
  std::vector<Part> parts;
  for (const auto& [pointer, rows] : tuples) parts.push_back({reinterpret_cast<void*>(pointer), rows});
  return parts;
}

void count_parts(const char* operation, const Layout& whole, const std::vector<Part>& parts) {
  for (size_t rank = 0; rank < parts.size(); ++rank)
    count(operation, "direct", static_cast<int>(rank), whole.outer * parts[rank].rows * whole.inner_nbytes);
}

void bind_scatter(const LayoutTuple& tuple, const StreamTuple& from, const PartTuples& tuples,
                  const StreamTuples& streams) {
  const Layout whole = layout_of(tuple);
  const auto parts = parts_of(tuples);
  const Streams on = streams_of(streams);
  without_gil([&] { transfer_of(on).scatter(whole, stream_of(from), parts, on); });
  count_parts("scatter", whole, parts);
}

void bind_gather(const PartTuples& tuples, const StreamTuples& streams, const LayoutTuple& tuple,
                 const StreamTuple& to) {
  const Layout whole = layout_of(tuple);
  const auto parts = parts_of(tuples);
  const Streams on = streams_of(streams);
  without_gil([&] { transfer_of(on).gather(parts, on, whole, stream_of(to)); });
  count_parts("gather", whole, parts);
}

}  // namespace

void bind_transfer(py::module_& m) {
  m.def("scatter", &bind_scatter, py::arg("whole"), py::arg("from_"), py::arg("parts"), py::arg("streams"),
        "Copies the parts (pointer, rows) out of whole (pointer, outer, rows, inner_nbytes), one behind the other.");
  m.def("gather", &bind_gather, py::arg("parts"), py::arg("streams"), py::arg("whole"), py::arg("to"), "The way back.");
}

}  // namespace mgpu::bindings
