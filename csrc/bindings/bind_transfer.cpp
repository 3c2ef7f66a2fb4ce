#include "backends.h"
#include "bindings/bindings.h"
#include "core/counters.h"
#include "core/transfer.h"

namespace mgpu::bindings {
namespace {

using PartTuples = std::vector<std::pair<Pointer, int64_t>>;  // pointer, rows

std::vector<Part> parts_of(const PartTuples& tuples) {
  std::vector<Part> parts;
  for (const auto& [pointer, rows] : tuples) parts.push_back({reinterpret_cast<void*>(pointer), rows});
  return parts;
}

void count_parts(const char* operation, const Layout& whole, const std::vector<Part>& parts) {
  for (size_t rank = 0; rank < parts.size(); ++rank)
    count(operation, "direct", static_cast<int>(rank), whole.outer * parts[rank].rows * whole.inner_nbytes);
}

void bind_scatter(const Layout& whole, const Stream& from, const PartTuples& tuples, const Streams& streams) {
  const auto parts = parts_of(tuples);
  without_gil([&] { transfer_of(streams, from).scatter(whole, from, parts, streams); });
  count_parts("scatter", whole, parts);
}

void bind_gather(const PartTuples& tuples, const Streams& streams, const Layout& whole, const Stream& to) {
  const auto parts = parts_of(tuples);
  without_gil([&] { transfer_of(streams, to).gather(parts, streams, whole, to); });
  count_parts("gather", whole, parts);
}

}  // namespace

void bind_transfer(py::module_& m) {
  py::class_<Layout>(m, "Layout", "How a dense tensor lies in memory, seen from the dimension along which it is cut.")
      .def(py::init([](Pointer pointer, int64_t outer, int64_t rows, int64_t inner_nbytes) {
             return Layout{reinterpret_cast<void*>(pointer), outer, rows, inner_nbytes};
           }),
           py::arg("pointer"), py::arg("outer"), py::arg("rows"), py::arg("inner_nbytes"));
  m.def("scatter", &bind_scatter, py::arg("whole"), py::arg("from_"), py::arg("parts"), py::arg("streams"),
        "Copy the parts (pointer, rows) out of the whole, one after the other.");
  m.def("gather", &bind_gather, py::arg("parts"), py::arg("streams"), py::arg("whole"), py::arg("to"),
        "Copy the parts (pointer, rows) into the whole, one after the other.");
}

}  // namespace mgpu::bindings
