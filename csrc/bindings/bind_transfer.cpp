#include "bindings/bindings.h"
#include "core/counters.h"
#include "core/error.h"
#include "core/transfer.h"
#include "rooms.h"

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

void bind_scatter(const LayoutTuple& tuple, const PartTuples& tuples) {
  const Layout whole = layout_of(tuple);
  const auto parts = parts_of(tuples);
  without_gil([&] { scatter(host_device_ops(), whole, parts); });
  count_parts("scatter", whole, parts);
}

void bind_gather(const PartTuples& tuples, const LayoutTuple& tuple) {
  const Layout whole = layout_of(tuple);
  const auto parts = parts_of(tuples);
  without_gil([&] { gather(host_device_ops(), parts, whole); });
  count_parts("gather", whole, parts);
}

void bind_gather_rows(const std::tuple<Pointer, int64_t, int64_t>& rows, const std::pair<Pointer, int64_t>& index,
                      float scale, float shift, Pointer out, const std::string& out_dtype) {
  const DType dtype = dtype_from(out_dtype);
  require(dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16,
          "gather_rows writes float32, float16 or bfloat16, not " + out_dtype);
  const auto& [rows_pointer, rows_count, row_count] = rows;
  const GatherRows call{reinterpret_cast<const uint8_t*>(rows_pointer),
                        rows_count,
                        row_count,
                        reinterpret_cast<const int64_t*>(index.first),
                        index.second,
                        scale,
                        shift,
                        reinterpret_cast<void*>(out),
                        dtype};
  without_gil([&] { host_device_ops().gather_rows(call); });
}

}  // namespace

void bind_transfer(py::module_& m) {
  m.def("scatter", &bind_scatter, py::arg("whole"), py::arg("parts"),
        "Copies the parts (pointer, rows) out of whole (pointer, outer, rows, inner_nbytes), one behind the other.");
  m.def("gather", &bind_gather, py::arg("parts"), py::arg("whole"), "The way back.");
  m.def("gather_rows", &bind_gather_rows, py::arg("rows"), py::arg("index"), py::arg("scale"), py::arg("shift"),
        py::arg("out"), py::arg("out_dtype"),
        "out[i] = rows[index[i]] * scale + shift; rows: (pointer, how many, elements of one), uint8; index: (pointer, "
        "count), int64.");
}

}  // namespace mgpu::bindings
